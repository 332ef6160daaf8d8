"""The page and its modules, from memory: plain files, and headers under which no other code runs in the page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"
# No inline script or style, nothing from elsewhere, and nobody frames it: names come from agents.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    # Asked again each time, answered by 304: after an update no old module meets a new one.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str


def read_static() -> dict[str, StaticFile]:
    """Every file of the page, by name."""
    found = {}
    for entry in files("controller.dashboard").joinpath("static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_file() and suffix in MEDIA_TYPES:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            found[entry.name] = StaticFile(body, MEDIA_TYPES[suffix], etag)
    return found


def build_pages() -> APIRouter:
    """``/`` and ``/dashboard/<file>``; open, since they hold nothing but code."""
    router = APIRouter(include_in_schema=False)
    static = read_static()

    @router.get("/")
    async def page(request: Request) -> Response:
        return _answer(static[PAGE], request)

    @router.get("/dashboard/{name}")
    async def module(name: str, request: Request) -> Response:
        if name not in static:
            raise HTTPException(404, "Not Found")
        return _answer(static[name], request)

    return router


def _answer(file: StaticFile, request: Request) -> Response:
    headers = HEADERS | {"ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
