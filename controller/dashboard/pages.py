"""The page and its modules: ``/`` and ``/dashboard/<file>``. Both are open, since they hold nothing but code."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from service.static_files import read_static

PAGE = "index.html"


def build_pages() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    static = read_static("controller.dashboard")

    @router.get("/")
    async def page(request: Request) -> Response:
        return static[PAGE].answer(request)

    @router.get("/dashboard/{name}")
    async def module(name: str, request: Request) -> Response:
        if name not in static:
            raise HTTPException(404, "Not Found")
        return static[name].answer(request)

    return router
