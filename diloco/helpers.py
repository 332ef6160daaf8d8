"""The other ranks of an island carry chunks for rank 0, which alone knows what a sync is made of.

Each of them has a thread that asks the synchronizer what rank 0 tells it to, over a connection of its own, and gives
the answer back. They meet at a Unix socket in a folder that only this user can enter, whose path travels over the
ranks' store. A message is a header (JSON) and a body, each behind its length; there is one at a time per connection.

A rank that dies breaks its connection, and with it the transfer that it had a part in; the agent ends them all anyway.
One that does not answer until the deadline is not asked again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx

from service.errors import UnavailableError, WadilocoError

logger = logging.getLogger(__name__)

LENGTHS = struct.Struct("<IQ")
ANSWER_S = 2.0
"""Time beyond a deadline that a helper has to say that it passed."""
MAX_HEADER_BYTES = 1 << 20
MAX_BASE_BYTES = 70
"""Of the folder for temporary files: the path of a socket in it has 107 at most."""


class Asks(Protocol):
    """What a helper asks the synchronizer of a fragment with, see `SynchronizerClient.answer_to`."""

    def answer_to(self, method: str, path: str, *, deadline_s: float, **arguments: Any) -> httpx.Response: ...


class Clients(Protocol):
    def of(self, fragment: int) -> Asks: ...


class Helper:
    """Another rank, as rank 0 sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.is_lost = False

    def answer_to(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float,
        fragment: int,
        params: Mapping[str, Any],
        headers: Mapping[str, str],
        content: bytes | memoryview = b"",
    ) -> httpx.Response:
        """What the synchronizer answered the helper, refusals included.

        Raises:
            UnavailableError: the synchronizer did not answer it in time, or it did not answer us.
        """
        order = {
            "fragment": fragment,
            "method": method,
            "path": path,
            "params": dict(params),
            "headers": dict(headers),
            "deadline_s": deadline_s,
        }
        try:
            self._connection.settimeout(max(deadline_s - time.time(), 0.0) + ANSWER_S)
            send_message(self._connection, order, content)
            told, body = receive_message(self._connection)
        except OSError as exc:
            self.is_lost = True
            self.close()
            raise UnavailableError(
                f"a rank that carries chunks does not answer: {exc or type(exc).__name__}", field="ranks"
            ) from exc
        if "error" in told:
            raise UnavailableError(str(told["error"]), field="synchronizer")
        request = httpx.Request(method, str(told["url"]))
        return httpx.Response(told["status"], headers=told["headers"], content=body, request=request)

    def close(self) -> None:
        self._connection.close()


class Helpers:
    """Those who help rank 0, as they come."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > MAX_BASE_BYTES:
            base = "/tmp"  # noqa: S108 (what is made in it is for this user alone)
        self._folder = Path(tempfile.mkdtemp(prefix="wadiloco-ranks-", dir=base))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "chunks"))
        self._listener.listen()
        self._helpers: list[Helper] = []
        threading.Thread(target=self._accept, name="helpers", daemon=True).start()

    @property
    def address(self) -> str:
        return str(self._folder / "chunks")

    def ready(self) -> list[Helper]:
        """Those who can be asked now."""
        return [helper for helper in list(self._helpers) if not helper.is_lost]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Wakes the thread that accepts, which closing alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for helper in list(self._helpers):
            helper.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._helpers.append(Helper(connection))


def help_at(address: str, clients: Clients) -> None:
    """Do what rank 0 says until it hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with contextlib.suppress(OSError):
            while True:
                order, body = receive_message(connection)
                send_message(connection, *_obey(order, body, clients))


def _obey(order: dict[str, Any], body: bytes, clients: Clients) -> tuple[dict[str, Any], bytes]:
    arguments: dict[str, Any] = {"params": order["params"], "headers": order["headers"]}
    if body:
        arguments["content"] = body
    try:
        client = clients.of(order["fragment"])
        answer = client.answer_to(order["method"], order["path"], deadline_s=order["deadline_s"], **arguments)
    except WadilocoError as exc:
        return {"error": exc.message}, b""
    told = {"status": answer.status_code, "headers": list(answer.headers.multi_items()), "url": str(answer.url)}
    return told, answer.content


def send_message(connection: socket.socket, header: Mapping[str, Any], body: bytes | memoryview) -> None:
    text = json.dumps(header).encode()
    connection.sendall(LENGTHS.pack(len(text), len(body)) + text)
    connection.sendall(body)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Raises `OSError` when the other end is gone, or does not speak like this one."""
    header_bytes, body_bytes = LENGTHS.unpack(_receive(connection, LENGTHS.size))
    if header_bytes > MAX_HEADER_BYTES:
        raise OSError(f"a header of {header_bytes} bytes")
    header: dict[str, Any] = json.loads(_receive(connection, header_bytes))
    return header, _receive(connection, body_bytes)


def _receive(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError("it hung up")
        view = view[got:]
    return bytes(buffer)
