"""``/docs``: the service's OpenAPI description as a page of its own, which needs no other server than this one.

FastAPI's page loads its code from a public network, which a fleet may not reach and which could then act with the
operator's token.
"""

from __future__ import annotations

from fastapi import APIRouter

from service.static_files import static_routes


def build_docs() -> APIRouter:
    return static_routes("service", page="docs.html", at="/docs", files_at="/docs")
