"""The store of `service.store` over HTTP, under ``/v1/store/{epoch}/{key}?group=``; keys may contain slashes.

| ``PUT`` with the value as body | set it |
| ``GET ?wait_s=`` | the value, as soon as there is one; 204 when there is none in time |
| ``HEAD`` | 200 when there is one, 204 when not |
| ``POST`` with a `Change` | add to a counter, or compare and set: a `Changed` |
| ``DELETE`` | a `Deleted` |
| ``GET /v1/store/{epoch}`` | a `KeyCount` |

An older epoch than the group's newest is refused with 409, also in the middle of a wait; a full group or
store with 429, which names what it is full of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request, Response
from fastapi.openapi.models import Example

from service.errors import InputError, OverloadedError
from service.store import MAX_KEY_CHARS, MAX_VALUE_BYTES, Values
from service.store_schema import MAX_WAIT_S, Change, Changed, Deleted, KeyCount
from service.wire import Wire

MAX_WAITING = 10_000
"""Requests that wait for a value at once."""
STORE_PATH = "/v1/store/"
OCTETS = "application/octet-stream"

CHANGES: dict[str, Example] = {
    "count": {"summary": "Add to a counter", "value": {"add": 1}},
    "compare": {"summary": "Set what is not there", "value": {"expected": "", "desired": "YWRkcmVzcw=="}},
}

Epoch = Annotated[int, Path(ge=0, le=2**63 - 1, description="Grows whenever the group's members change.")]
Key = Annotated[str, Path(min_length=1, max_length=MAX_KEY_CHARS)]
GroupName = Annotated[str, Query(max_length=256, description="Whose values: a name that no other group has.")]


class SharedStore:
    """`Values` with waiting: requests of one event loop."""

    def __init__(self, values: Values | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.values = values or Values()
        self.values.on_new_epoch = self.announce
        self._clock = clock
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._closed = False

    @property
    def now_s(self) -> float:
        return self._clock()

    def announce(self) -> None:
        """Something has changed: all who wait look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """Let everybody who waits answer now, and from now on at once."""
        self._closed = True
        self.announce()

    async def wait_for(self, group: str, epoch: int, key: str, wait_s: float) -> bytes | None:
        """The value as soon as there is one, None when there is none after ``wait_s`` seconds.

        Raises:
            ConflictError: the epoch is over.
            OverloadedError: too many wait already.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            changed = self._changed
            value = self.values.get(group, epoch, key, now_s=self.now_s)
            left_s = deadline_s - time.monotonic()
            if value is not None or left_s <= 0 or self._closed:
                return value
            await self._wait(changed, left_s)

    async def _wait(self, changed: asyncio.Event, timeout_s: float) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError("too many wait for values", field="key", remedy="come back later")
        self._num_waiting += 1
        try:
            await asyncio.wait_for(changed.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            self._num_waiting -= 1


def build_store_router(store: SharedStore) -> APIRouter:
    router = APIRouter(prefix="/v1/store", tags=["store"])
    values = store.values

    @router.put("/{epoch}/{key:path}", status_code=204, summary="Set a value: the body, raw bytes")
    async def put_value(epoch: Epoch, key: Key, request: Request, group: GroupName = "") -> None:
        values.set(group, epoch, key, await _body(request), now_s=store.now_s)
        store.announce()

    @router.get("/{epoch}/{key:path}", summary="A value, as soon as there is one", response_class=Response)
    async def get_value(
        epoch: Epoch, key: Key, group: GroupName = "", wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
    ) -> Response:
        value = await store.wait_for(group, epoch, key, wait_s)
        return Response(status_code=204) if value is None else Response(value, media_type=OCTETS)

    @router.head("/{epoch}/{key:path}", summary="Whether there is a value")
    async def head_value(epoch: Epoch, key: Key, group: GroupName = "") -> Response:
        found = values.get(group, epoch, key, now_s=store.now_s) is not None
        return Response(status_code=200 if found else 204)

    @router.post("/{epoch}/{key:path}", summary="Add to a counter, or compare and set")
    async def change_value(
        epoch: Epoch, key: Key, change: Annotated[Change, Body(openapi_examples=CHANGES)], group: GroupName = ""
    ) -> Response:
        value = _apply(values, group, epoch, key, change, now_s=store.now_s)
        store.announce()
        return _json(Changed.model_construct(value=value))

    @router.delete("/{epoch}/{key:path}", summary="Forget a value")
    async def delete_value(epoch: Epoch, key: Key, group: GroupName = "") -> Deleted:
        return Deleted(deleted=values.delete(group, epoch, key, now_s=store.now_s))

    @router.get("/{epoch}", summary="How many values there are")
    async def count_values(epoch: Epoch, group: GroupName = "") -> KeyCount:
        return KeyCount(num_keys=values.num_keys(group, epoch, now_s=store.now_s))

    return router


def _apply(values: Values, group: str, epoch: int, key: str, change: Change, *, now_s: float) -> bytes:
    if change.add is not None and change.expected is None and change.desired is None:
        return str(values.add(group, epoch, key, change.add, now_s=now_s)).encode()
    if change.add is None and change.expected is not None and change.desired is not None:
        return values.compare_set(group, epoch, key, change.expected, change.desired, now_s=now_s)
    raise InputError("is neither a sum nor a comparison", field="add", remedy="give add, or expected and desired")


async def _body(request: Request) -> bytes:
    """The body, refused before it is read whole where it is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_VALUE_BYTES:
            raise InputError(f"has over {MAX_VALUE_BYTES} bytes", field="value", remedy="store less in one value")
    return bytes(body)


def _json(model: Wire) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
