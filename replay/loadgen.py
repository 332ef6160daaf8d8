"""Open-loop load: each request leaves at its planned time, whether or not earlier ones were answered.

A closed loop would slow down with the server and so hide exactly the queueing that is to be measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

OnResult = Callable[["RequestResult"], None]


class Status(StrEnum):
    """How a request ended."""

    OK = "ok"
    HTTP_ERROR = "http_error"
    """The server answered with an error, or sent one inside the stream."""
    TIMEOUT = "timeout"
    REFUSED = "refused"
    """No connection."""
    DISCONNECTED = "disconnected"
    """The connection ended before the answer was complete."""
    CANCELLED = "cancelled"
    """The replay was stopped first."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What to send, to which server, and when (seconds after the start of the load)."""

    arrival_s: float
    server_index: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of one request. Times without ``unix`` count from the start of the load."""

    index: int
    """Position in the sequence given to `run_load`."""
    server_index: int
    arrival_s: float
    """Planned."""
    sent_s: float
    """Actual: before connecting, so that a full accept queue counts."""
    ended_s: float
    """Last token, or the moment of failure."""
    sent_unix_s: float
    ended_unix_s: float
    status: Status
    ttft_s: float | None = None
    """Sent to first token event."""
    itl_s: tuple[float, ...] = ()
    """Gaps between token events, as their bytes arrived."""
    e2e_s: float | None = None
    """Sent to last token event; None unless the request is ok."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    http_status: int | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def lateness_s(self) -> float:
        """How much later than planned it was sent: the load generator's own fault."""
        return self.sent_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    url: str
    model: str
    max_model_len: int


async def discover(
    server: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 5.0
) -> ServerInfo:
    """Ask ``/v1/models`` of ``server`` (its base URL) which model it serves; ``model`` must be among them if given.

    Raises:
        UnavailableError: nobody answers.
        InputError: not a vLLM server, or it does not serve ``model``.
    """
    raise NotImplementedError


async def run_load(
    requests: Sequence[PlannedRequest],
    servers: Sequence[str],
    *,
    model: str,
    timeout_s: float,
    start_at_monotonic_s: float | None = None,
    exit_event: asyncio.Event | None = None,
    on_result: OnResult | None = None,
    api_key: str | None = None,
) -> list[RequestResult]:
    """Send every request at its time and wait until all have ended; results in the order of ``requests``.

    ``start_at_monotonic_s`` is the `time.monotonic` at which the load starts (now if None). When ``exit_event`` is
    set, requests in flight are cancelled and those not yet sent have no result.
    """
    raise NotImplementedError
