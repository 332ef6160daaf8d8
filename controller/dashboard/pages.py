"""The page and its modules: ``/`` and ``/dashboard/<file>``. Both are open, since they hold nothing but code."""

from __future__ import annotations

from fastapi import APIRouter

from service.static_files import static_routes


def build_pages() -> APIRouter:
    return static_routes("controller.dashboard", page="index.html", at="/", files_at="/dashboard")
