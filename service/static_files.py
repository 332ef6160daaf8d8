"""Static files of a page, from memory, under headers that let no other code run in it."""

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
# No inline script or style, nothing from elsewhere, and nobody frames it: names on a page come from other machines.
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

    def answer(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def read_static(package: str) -> dict[str, StaticFile]:
    """Every file of the package's folder ``static``, by name."""
    found = {}
    for entry in files(package).joinpath("static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_file() and suffix in MEDIA_TYPES:
            body = entry.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            found[entry.name] = StaticFile(body, MEDIA_TYPES[suffix], etag)
    return found


def static_routes(package: str, *, page: str, at: str, files_at: str) -> APIRouter:
    """The file ``page`` at ``at``, and every file of the package's folder ``static`` below ``files_at``."""
    router = APIRouter(include_in_schema=False)
    static = read_static(package)

    @router.get(at)
    async def index(request: Request) -> Response:
        return static[page].answer(request)

    @router.get(f"{files_at}/{{name}}")
    async def file(name: str, request: Request) -> Response:
        if name not in static:
            raise HTTPException(404, "Not Found")
        return static[name].answer(request)

    return router
