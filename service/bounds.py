"""HTTP connections whose every wait for a client ends, and of which there are so many at most (`service.admission`):
uvicorn itself waits for half a request, and for a client that does not read, as long as the connection lasts.

    request line and headers   HEAD_DEADLINE_S after the connection, or the first byte of a later request
    body                       `service.app.BodyUntilExit`
    answer                     STALLED_S without a byte taken by the client
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.admission import RESERVED_HEAD_S, Admission, Doorkeeper

logger = logging.getLogger(__name__)

HEAD_DEADLINE_S = 20.0
STALLED_S = 30.0
BODY_BUFFER_BYTES = 1 << 20
"""Of a body that the application has not taken yet, per connection. At uvicorn's 64 KiB the other end is stopped and
woken for every piece that arrives."""
_ACKED, _ACKED_AT = struct.Struct("=Q"), 120
"""Where Linux has ``tcpi_bytes_acked`` in its ``struct tcp_info``; older kernels end before it."""


class Bounds(asyncio.Protocol):
    """Mixed in before one of uvicorn's protocols; an overdue connection is dropped, and what answers it is cancelled
    as for a client that went away."""

    admission: Admission | None = None
    """Of the process; None: as many connections as come."""
    transport: asyncio.Transport
    app: ASGIApp
    cycle: Any
    """The request that is being answered, or was last; None before the first."""
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    _counted: bool = False
    _reserved: Doorkeeper | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._is_let_in():
            self._watch_head()
        else:
            self.transport.abort()

    def _is_let_in(self) -> bool:
        if self.admission is None:
            return True
        served = self.admission.enter()
        self._counted = served is not None
        if served is False:
            self.app = self._reserved = Doorkeeper(self.app, self.admission)
        return self._counted

    def _count_out(self) -> None:
        if self.admission is not None and self._counted:
            self._counted = False
            self.admission.leave(served=self._reserved is None or self._reserved.served)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request:
            self._end_head_timer()
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head_timer()
        self._end_stall_timer()
        self._count_out()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall_timer()

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            is_reserved = self._reserved is not None and not self._reserved.served
            deadline_s = min(HEAD_DEADLINE_S, RESERVED_HEAD_S) if is_reserved else HEAD_DEADLINE_S
            self._head_timer = asyncio.get_running_loop().call_later(deadline_s, self._head_overdue, deadline_s)

    def _head_overdue(self, deadline_s: float) -> None:
        self._head_timer = None
        if not self._has_request:
            self._drop("no whole request within %g s", deadline_s)

    def _watch_writes(self) -> None:
        left, taken = self.transport.get_write_buffer_size(), _taken_bytes(self.transport)
        if self._stall_timer is None:
            self._stall_timer = asyncio.get_running_loop().call_later(STALLED_S, self._writes_overdue, left, taken)

    def _writes_overdue(self, left: int, taken: int | None) -> None:
        self._stall_timer = None
        now_taken = _taken_bytes(self.transport)
        takes = taken is not None and now_taken is not None and now_taken > taken
        if takes or self.transport.get_write_buffer_size() < left:
            self._watch_writes()  # slow, but it reads
        else:
            self._drop("no byte of the answer taken within %g s", STALLED_S)

    def _drop(self, why: str, *values: object) -> None:
        logger.info(f"connection dropped: {why}", *values)
        self.transport.abort()

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _taken_bytes(transport: asyncio.Transport) -> int | None:
    """Bytes that the other host has acknowledged since the connection began; None where that is not to be had.

    A buffer does not tell it all: behind TLS it is a second one that stays as it is while the first one, with megabytes
    of an answer in large pieces, is read slowly.
    """
    found = transport.get_extra_info("socket")
    if found is None or not hasattr(socket, "TCP_INFO"):
        return None
    with contextlib.suppress(OSError, struct.error), socket.socket(fileno=os.dup(found.fileno())) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + _ACKED.size)
        return int(_ACKED.unpack_from(info, _ACKED_AT)[0])
    return None


class BoundedH11(Bounds, H11Protocol):
    """HTTP in Python."""


def bounded_protocol(*, many_clients: bool, admission: Admission | None = None) -> type[asyncio.Protocol]:
    """The quicker one for many clients, where it is installed."""
    base = _quick_protocol() if many_clients else BoundedH11
    return type(base.__name__, (base,), {"admission": admission})


def _quick_protocol() -> type[Bounds]:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return BoundedH11

    class BoundedHttpTools(Bounds, HttpToolsProtocol):
        """HTTP in C."""

        def on_body(self, body: bytes) -> None:
            is_plain = not self.parser.should_upgrade() and not self.cycle.response_complete
            if is_plain and len(self.cycle.body) + len(body) <= BODY_BUFFER_BYTES:
                self.cycle.body += body
                self.cycle.message_event.set()
            else:
                super().on_body(body)

    return BoundedHttpTools
