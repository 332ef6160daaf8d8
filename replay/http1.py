"""An HTTP/1.1 response, decoded as its bytes arrive (RFC 9112): status, header fields, chunked or counted body.

The load generator shares its cores with the servers that it measures, so a token must cost little to read. A general
client costs several times as much per token; this is the part of the protocol that an answer needs.
"""

from __future__ import annotations

import re

MAX_HEAD_BYTES = 64 << 10
MAX_CHUNK_BYTES = 16 << 20

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")


class HttpFormatError(Exception):
    """The peer does not speak HTTP/1.1."""


class ResponseDecoder:
    """Feed it what arrives; it returns the body bytes in it."""

    __slots__ = ("_buffer", "_chunked", "_remaining", "complete", "keep_alive", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        """None until the head of the final (not 1xx) response has arrived."""
        self.complete = False
        self.keep_alive = False
        self._buffer = bytearray()
        self._chunked = False
        self._remaining: int | None = None
        """Body bytes still to come; None: chunked, or until the connection closes."""

    @property
    def untouched(self) -> bool:
        """Whether not one byte has arrived."""
        return self.status is None and not self._buffer

    def feed(self, data: bytes) -> bytes:
        """Decode more bytes.

        Raises:
            HttpFormatError: they are no HTTP/1.1 response.
        """
        self._buffer += data
        while self.status is None:
            if not self._read_head():
                return b""
        if self._chunked:
            return self._read_chunks()
        body = bytes(self._buffer)
        self._buffer.clear()
        if self._remaining is not None:
            body = body[: self._remaining]
            self._remaining -= len(body)
            self.complete = self._remaining == 0
        return body

    def end_of_input(self) -> None:
        """The connection has closed: complete if the body had no other end."""
        if self.status is not None and not self._chunked and self._remaining is None:
            self.complete = True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpFormatError("endless header")
            return False
        status_line, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise HttpFormatError(f"no HTTP/1.1 answer: {status_line[:80]!r}")
        status = int(match[2])
        if status < 200:
            return True
        self.status = status
        self._read_fields(lines, keep_alive=match[1] == b"1")
        return True

    def _read_fields(self, lines: list[bytes], *, keep_alive: bool) -> None:
        fields = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(b":") for x in lines)}
        self._chunked = fields.get(b"transfer-encoding", b"").endswith(b"chunked")
        length = fields.get(b"content-length")
        if not self._chunked and length is not None:
            if not length.isdigit():
                raise HttpFormatError(f"bad Content-Length {length[:40]!r}")
            self._remaining = int(length)
            self.complete = self._remaining == 0
        bounded = self._chunked or self._remaining is not None
        self.keep_alive = keep_alive and bounded and fields.get(b"connection") != b"close"

    def _read_chunks(self) -> bytes:
        buffer = self._buffer
        parts: list[bytes] = []
        position = 0
        while not self.complete:
            line_end = buffer.find(b"\r\n", position)
            if line_end < 0:
                break
            size = _chunk_size(bytes(buffer[position:line_end]))
            start = line_end + 2
            if size == 0:
                # Trailer fields, if any, end with an empty line.
                end = buffer.find(b"\r\n\r\n", line_end)
                self.complete = end >= 0
                position = end + 4 if self.complete else position
                break
            if len(buffer) < start + size + 2:
                break
            parts.append(bytes(buffer[start : start + size]))
            position = start + size + 2
        del buffer[:position]
        return b"".join(parts)


def _chunk_size(line: bytes) -> int:
    match = _CHUNK_SIZE.fullmatch(line)
    size = int(match[1], 16) if match else MAX_CHUNK_BYTES + 1
    if size > MAX_CHUNK_BYTES:
        raise HttpFormatError(f"bad chunk size {line[:40]!r}")
    return size
