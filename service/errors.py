"""The errors that a user meets: each names the field at fault and the remedy.

WadilocoError
├── ConfigError          settings that cannot work          → exit code 2
├── InputError           a file or request that is wrong    → exit code 2, HTTP 422
├── UnavailableError     a peer or resource that is missing → exit code 3, HTTP 503
├── OverloadedError      more than may be served at once    → exit code 3, HTTP 429
└── ConflictError        an old epoch, a taken name or port → exit code 4, HTTP 409
"""

from __future__ import annotations

from typing import ClassVar


class WadilocoError(Exception):
    """What went wrong, in which field, and what to do about it."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, field: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.remedy = remedy

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{where}{self.message}{remedy}"


class ConfigError(WadilocoError):
    """Settings that cannot work."""

    exit_code = 2
    http_status = 422


class InputError(WadilocoError):
    """A file or a request whose content is wrong."""

    exit_code = 2
    http_status = 422


class UnavailableError(WadilocoError):
    """A peer, port, directory or package that is needed and missing."""

    exit_code = 3
    http_status = 503


class OverloadedError(WadilocoError):
    """More clients or requests than may be served at once: come back later."""

    exit_code = 3
    http_status = 429


class ConflictError(WadilocoError):
    """An old epoch, or a name, slot or port that somebody else holds."""

    exit_code = 4
    http_status = 409
