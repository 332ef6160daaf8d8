"""Serving: clear errors on an address that cannot be had."""

from __future__ import annotations

import socket

import pytest

from service.errors import ConfigError, ConflictError
from service.server import bind


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConflictError, match=rf"{port} on 127\.0\.0\.1 is in use .*--port"):
            bind("127.0.0.1", port)


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"host: cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)
