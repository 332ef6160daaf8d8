"""What every error looks like over HTTP."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import JSONResponse


def error_response(status: int, kind: str, message: str, field: str | None, remedy: str | None) -> Response:
    body = {"error": kind, "message": _printable(message), "field": field and _printable(field), "remedy": remedy}
    return JSONResponse(body, status_code=status)


def _printable(text: str) -> str:
    """Errors quote what was sent, which may be half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
