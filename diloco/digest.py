"""Digest and range headers of chunked transfers: RFC 9530 (sha-256 only) and RFC 9110 byte ranges."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from service.errors import InputError

DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):\s*(?:$|,)")
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
SHA256_BYTES = 32
WANT_CONTENT_DIGEST = "Want-Content-Digest"
NOT_WANTED = "sha-256=0"
"""Its value where the digest of the whole is enough: every byte is then hashed once at each end."""


class Hash(Protocol):
    """What `hashlib` makes."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class ByteRange(NamedTuple):
    """Bytes ``start`` (included) to ``stop`` (excluded) of ``total``."""

    start: int
    stop: int
    total: int


def sha256(*pieces: bytes | memoryview) -> bytes:
    """The digest of the pieces put together."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def sha256_of_start(pieces: Sequence[bytes | memoryview], size: int) -> tuple[bytes, bytes]:
    """The digests of the first ``size`` bytes of the pieces put together, and of all, from one pass over them."""
    digest, left, of_start = hashlib.sha256(), size, None
    for piece in pieces:
        digest.update(piece[:left])
        if len(piece) >= left and of_start is None:
            of_start = digest.digest()
        digest.update(piece[left:])
        left = max(left - len(piece), 0)
    whole = digest.digest()
    return of_start or whole, whole


def format_digest(digest: bytes) -> str:
    """The value of a ``Content-Digest`` or ``Repr-Digest`` field."""
    return f"sha-256=:{base64.b64encode(digest).decode()}:"


def parse_digest(value: str | None, *, field: str) -> bytes:
    """The sha-256 in a ``Content-Digest`` or ``Repr-Digest`` field."""
    match = DIGEST.search(value or "")
    if match is None:
        raise InputError("has no sha-256 digest", field=field, remedy="send sha-256=:<base64>:")
    try:
        digest = base64.b64decode(match[1], validate=True)
    except binascii.Error as exc:
        raise InputError("is not base64", field=field) from exc
    if len(digest) != SHA256_BYTES:
        raise InputError(f"has {len(digest)} bytes, sha-256 has {SHA256_BYTES}", field=field)
    return digest


def verify_digest(data: bytes | memoryview, value: str | None, *, field: str = "Content-Digest") -> None:
    """Check the bytes of one message against its digest field."""
    require_digest(sha256(data), value, field=field)


def require_digest(digest: bytes, value: str | None, *, field: str = "Content-Digest") -> None:
    """As `verify_digest`, of bytes that have been hashed."""
    if digest != parse_digest(value, field=field):
        raise InputError("does not match the bytes that arrived", field=field, remedy="send the chunk again")


def format_content_range(part: ByteRange) -> str:
    return f"bytes {part.start}-{part.stop - 1}/{part.total}"


def parse_content_range(value: str | None, *, length: int) -> ByteRange:
    """The place of a body of ``length`` bytes in its whole."""
    match = CONTENT_RANGE.fullmatch(value or "")
    if match is None:
        raise InputError("is not of the form bytes FIRST-LAST/TOTAL", field="Content-Range")
    part = ByteRange(int(match[1]), int(match[2]) + 1, int(match[3]))
    if part.stop > part.total or part.stop - part.start != length:
        raise InputError(f"{value} does not fit a body of {length} bytes", field="Content-Range")
    return part


def parse_range(value: str, *, total: int, max_bytes: int) -> ByteRange:
    """The part to answer a ``Range`` field with: at most ``max_bytes`` from where it starts."""
    match = RANGE.fullmatch(value)
    if match is None:
        raise InputError("is not of the form bytes=FIRST-LAST", field="Range")
    start = int(match[1])
    last = int(match[2]) if match[2] else total - 1
    if start > last or start >= total:
        raise InputError(f"{value} is outside the {total} bytes", field="Range")
    return ByteRange(start, min(last + 1, total, start + max_bytes), total)
