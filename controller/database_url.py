"""The URL of a PostgreSQL database, which may hold a password: shown without it, wherever it is shown."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pydantic import Secret

SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
HINT = "write postgresql://USER@HOST:PORT/DATABASE, or postgresql://USER@/DATABASE?host=FOLDER for a socket"
_SECRET_KEYS = re.compile("password|secret|token", re.IGNORECASE)


class DatabaseUrl(Secret[str]):
    """``postgresql://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=verify-full``; every part but the scheme may be left out,
    as libpq takes what is missing from its environment and from ``~/.pgpass``."""

    def _display(self) -> str:
        parts = urlsplit(self.get_secret_value())
        user, has_password, _ = parts.netloc.rpartition("@")[0].partition(":")
        login = f"{user}{':***' if has_password else ''}@" if user or has_password else ""
        query = "&".join(
            f"{key}={'***' if _SECRET_KEYS.search(key) else quote(value, safe='/:,')}"
            for key, value in parse_qsl(parts.query)
        )
        return f"postgresql://{login}{parts.netloc.rpartition('@')[2]}{parts.path}{'?' if query else ''}{query}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no message may hold."""
        parts = urlsplit(self.get_secret_value())
        raw = parts.netloc.rpartition("@")[0].partition(":")[2]
        queried = [value for key, value in parse_qsl(parts.query) if _SECRET_KEYS.search(key)]
        return tuple(secret for secret in (raw, unquote(raw), *queried) if secret)


def parse_database_url(text: str) -> DatabaseUrl:
    """Raises `ValueError`, without a word of the password, when it is not the URL of a PostgreSQL database."""
    try:
        parts = urlsplit(text.strip())
        _ = parts.port
    except ValueError:
        raise ValueError(f"not a URL: {HINT}, with special characters of the password percent-encoded") from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{parts.scheme} is no database that a journal can be in: name a file, or {HINT}")
    if parts.netloc.count("@") > 1 or parts.fragment:
        raise ValueError(f"not a URL: {HINT}, with special characters of the password percent-encoded")
    if len(parts.path) < 2 or "/" in parts.path[1:]:
        raise ValueError(f"no database is named: {HINT}")
    return DatabaseUrl(text.strip())


def read_journal(value: object) -> object:
    """What names a journal: the path of a file or the URL of a database; anything but text is left to its type.

    Raises:
        ValueError: it names neither.
    """
    if not isinstance(value, str | Path):
        return value
    if isinstance(value, str) and is_database_url(value):
        return parse_database_url(value)
    if not Path(value).name:
        raise ValueError("names no file: give one, for example wadiloco-controller.sqlite")
    return Path(value)


def is_database_url(text: str) -> bool:
    return re.match(r"\s*[a-z][a-z0-9+]*://", text, re.IGNORECASE) is not None
