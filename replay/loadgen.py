"""Open-loop load: each request leaves at its planned time, whether or not earlier ones were answered.

A closed loop would slow down with the server and so hide exactly the queueing that is to be measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from replay.completion_stream import explain_error
from replay.connection import ConnectFailedError, ConnectionBrokenError, ConnectionPool, Exchange
from replay.endpoint import CompletionRequests, ServerInfo, discover, parse_endpoint
from replay.priority import ahead_of_others

__all__ = ["PlannedRequest", "RequestResult", "ServerInfo", "Status", "discover", "run_load"]

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
    start_s = time.monotonic() if start_at_monotonic_s is None else start_at_monotonic_s
    load = _Load(servers, model=model, timeout_s=timeout_s, start_s=start_s, on_result=on_result, api_key=api_key)
    work = asyncio.create_task(load.send_all(requests))
    stop = asyncio.create_task((exit_event or asyncio.Event()).wait())
    try:
        with ahead_of_others():
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        stop.cancel()
        work.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)
        load.close()
    return [load.results[index] for index in sorted(load.results)]


class _Load:
    """One load in progress."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        model: str,
        timeout_s: float,
        start_s: float,
        on_result: OnResult | None,
        api_key: str | None,
    ) -> None:
        endpoints = [parse_endpoint(server) for server in servers]
        self.results: dict[int, RequestResult] = {}
        self._pools = [ConnectionPool(endpoint) for endpoint in endpoints]
        self._formats = [CompletionRequests(endpoint, model=model, api_key=api_key) for endpoint in endpoints]
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._unix_offset_s = time.time() - time.monotonic()
        self._on_result = on_result

    async def send_all(self, requests: Sequence[PlannedRequest]) -> None:
        in_order = sorted(enumerate(requests), key=lambda numbered: numbered[1].arrival_s)
        async with asyncio.TaskGroup() as in_flight:
            for index, request in in_order:
                # Formatted before it is due: the work does not delay it.
                payload = self._formats[request.server_index].payload(request.prompt_token_ids, request.max_tokens)
                wait_s = self._start_s + request.arrival_s - time.monotonic()
                await asyncio.sleep(max(0.0, wait_s))
                in_flight.create_task(self._send(index, request, payload))

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    async def _send(self, index: int, request: PlannedRequest, payload: bytes) -> None:
        exchange = Exchange()
        sent_at_s = time.monotonic()
        status, detail = Status.CANCELLED, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pools[request.server_index].run(payload, exchange)
            status, detail = _judge(exchange)
        except TimeoutError:
            status, detail = Status.TIMEOUT, f"no complete answer within {self._timeout_s:g} s"
        except ConnectFailedError as exc:
            status, detail = Status.REFUSED, str(exc)
        except ConnectionBrokenError as exc:
            # Some servers close right after [DONE] without ending the chunked body.
            status, detail = _judge(exchange) if exchange.stream.done else (Status.DISCONNECTED, str(exc))
        finally:
            # Also when cancelled: what was sent has a result.
            self._record(self._result(index, request, exchange, sent_at_s, status, detail))

    def _record(self, result: RequestResult) -> None:
        self.results[result.index] = result
        if self._on_result is not None:
            self._on_result(result)

    def _result(
        self, index: int, request: PlannedRequest, exchange: Exchange, sent_at_s: float, status: Status, detail: str
    ) -> RequestResult:
        stream = exchange.stream
        ok = status is Status.OK and stream.last_token_at_s is not None
        ended_at_s = stream.last_token_at_s if ok and stream.last_token_at_s is not None else time.monotonic()
        first_at_s = stream.first_token_at_s
        return RequestResult(
            index=index,
            server_index=request.server_index,
            arrival_s=request.arrival_s,
            sent_s=sent_at_s - self._start_s,
            ended_s=ended_at_s - self._start_s,
            sent_unix_s=sent_at_s + self._unix_offset_s,
            ended_unix_s=ended_at_s + self._unix_offset_s,
            status=status,
            ttft_s=None if first_at_s is None else first_at_s - sent_at_s,
            itl_s=tuple(stream.itl_s),
            e2e_s=ended_at_s - sent_at_s if ok else None,
            prompt_tokens=stream.prompt_tokens,
            output_tokens=stream.completion_tokens,
            http_status=exchange.decoder.status,
            detail=detail,
        )


def _judge(exchange: Exchange) -> tuple[Status, str]:
    """What a complete answer amounts to."""
    stream, http_status = exchange.stream, exchange.decoder.status
    if http_status != 200:
        return Status.HTTP_ERROR, f"HTTP {http_status}: {explain_error(exchange.error_body)}"
    if stream.error is not None:
        return Status.HTTP_ERROR, f"error in the stream: {stream.error}"
    if stream.last_token_at_s is None:
        return Status.HTTP_ERROR, "an answer without a token"
    if not stream.done:
        return Status.DISCONNECTED, "the stream ended without [DONE]"
    return Status.OK, ""
