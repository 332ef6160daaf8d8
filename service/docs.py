"""``/docs``: the service's OpenAPI description as a page of its own, which needs no other server than this one.

FastAPI's page loads its code from a public network, which a fleet may not reach and which could then act with the
operator's token.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from service.static_files import read_static


def build_docs() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    static = read_static("service")

    @router.get("/docs")
    async def page(request: Request) -> Response:
        return static["docs.html"].answer(request)

    @router.get("/docs/{name}")
    async def file(name: str, request: Request) -> Response:
        if name not in static:
            raise HTTPException(404, "Not Found")
        return static[name].answer(request)

    return router
