"""What the store of `service.store` says over HTTP, see `service.store_api`."""

from __future__ import annotations

from pydantic import Base64Bytes, Field

from service.wire import Order, Wire

MAX_WAIT_S = 30.0
"""Longest wait of one request."""
MAX_COUNTER = 2**63 - 1


class Change(Order):
    """One of the two: ``add``, or ``expected`` with ``desired`` (base64)."""

    add: int | None = Field(default=None, ge=-MAX_COUNTER, le=MAX_COUNTER)
    expected: Base64Bytes | None = None
    desired: Base64Bytes | None = None


class Changed(Wire):
    """The value after the change."""

    value: Base64Bytes


class Deleted(Wire):
    deleted: bool


class KeyCount(Wire):
    num_keys: int
