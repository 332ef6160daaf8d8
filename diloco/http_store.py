"""A `torch.distributed.Store` over HTTP: process groups rendezvous over `service.store_api`, and no rank holds it.

With `TCPStore` the store dies with rank 0, and every other rank with it. This one is at the agent (for the ranks of
one host, so that a dead controller costs no step) or at the controller (for ranks of several hosts).
"""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import httpx
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from service.client import refusal
from service.errors import UnavailableError
from service.store_schema import MAX_WAIT_S, Changed, Deleted, KeyCount

ATTEMPT_PAUSE_S = 0.1
WAIT_SLICE_S = 1.0
"""Longest wait of one request: after that the store looks whether it was cancelled."""


class HttpStore(Store):
    """The values of one group in one epoch. Every call ends within the timeout.

    Errors are UnavailableError (no answer in time), ConflictError (a newer epoch has begun) and
    `torch.distributed.DistStoreError` (no value in time), which torch passes on as they are.
    """

    def __init__(
        self,
        http: httpx.Client,
        *,
        group: str,
        epoch: int,
        timeout_s: float,
        cancelled: threading.Event | None = None,
    ) -> None:
        """``http`` has the base URL, and a token where one is needed; ``cancelled`` ends every wait."""
        super().__init__()
        self._http = http
        self._base = f"/v1/store/{epoch}"
        self._params = {"group": group}
        self._cancelled = cancelled or threading.Event()
        self._timeout_s = timeout_s

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return False

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("PUT", key, content=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The value, waiting for it."""
        return self._await_value(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all the keys have values."""
        deadline_s = time.monotonic() + (timeout.total_seconds() if timeout is not None else self._timeout_s)
        for key in keys:
            self._await_value(key, deadline_s - time.monotonic())

    def add(self, key: str, amount: int) -> int:
        """The sum after adding. Never sent twice: a lost answer leaves open whether it was counted."""
        return int(self._change(key, {"add": amount}))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._change(key, {"expected": _encoded(expected), "desired": _encoded(desired)})

    def check(self, keys: list[str]) -> bool:
        """Whether all the keys have values, without waiting."""
        return all(self._ask("HEAD", key).status_code == httpx.codes.OK for key in keys)

    def delete_key(self, key: str) -> bool:
        return Deleted.model_validate_json(self._ask("DELETE", key).content).deleted

    def num_keys(self) -> int:
        return KeyCount.model_validate_json(self._ask("GET", "").content).num_keys

    def clone(self) -> HttpStore:
        """Itself: the connections are made by the client, which threads may share."""
        return self

    # The names under which torch's C++ calls these; the others it calls as Python does.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815

    def _change(self, key: str, change: dict[str, Any]) -> bytes:
        answer = self._ask("POST", key, json=change, attempts=1)
        return Changed.model_validate_json(answer.content).value

    def _await_value(self, key: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            wait_s = min(left_s, WAIT_SLICE_S, MAX_WAIT_S)
            answer = self._ask("GET", key, wait_s=wait_s)
            if answer.status_code == httpx.codes.OK:
                return answer.content
            if left_s <= wait_s:
                raise DistStoreError(f"no value for {key} within {timeout_s:.1f} s")

    def _ask(
        self,
        method: str,
        key: str,
        *,
        wait_s: float = 0.0,
        attempts: int | None = None,
        **arguments: Any,
    ) -> httpx.Response:
        path = f"{self._base}/{quote(key)}" if key else self._base
        params = self._params | ({"wait_s": f"{wait_s:.3f}"} if wait_s else {})
        error: Exception | None = None
        for left_s in self._attempts(attempts):
            try:
                answer = self._http.request(method, path, params=params, timeout=left_s + wait_s, **arguments)
            except httpx.HTTPError as exc:
                error = exc
                continue
            if answer.is_success:
                return answer
            if not answer.is_server_error:
                raise refusal(answer, field="store")
            error = refusal(answer, field="store")
        raise UnavailableError(f"no answer for {key}: {type(error).__name__}: {error}", field="store") from error

    def _attempts(self, most: int | None) -> Iterator[float]:
        """The time left for each attempt, until there is none.

        Raises:
            UnavailableError: cancelled.
        """
        deadline_s = time.monotonic() + self._timeout_s
        number = 0
        while (left_s := deadline_s - time.monotonic()) > 0 and (most is None or number < most):
            if self._cancelled.is_set() or (number and self._cancelled.wait(ATTEMPT_PAUSE_S)):
                raise UnavailableError("the rendezvous was given up", field="store")
            number += 1
            yield left_s


def _encoded(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()
