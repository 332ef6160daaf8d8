"""Samples reach a real receiver in order, through downtime, refusals and overload; the queue stays bounded."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from controller.schema import RejectedSample, SampleReceipt
from sidecar.push import DropReason, Pusher, PushOutcome
from sidecar.schema import EngineState, ForecastPoint, LoadSample
from tests.sidecar.helpers import until


def sample(t_s: float) -> LoadSample:
    return LoadSample(server_id="s", node="n", t_s=t_s, state=EngineState.READY)


class Receiver:
    """A controller's ``POST /v1/samples`` whose mood can be changed."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.samples: list[LoadSample] = []
        self.batch_sizes: list[int] = []
        self.status = 200
        self.max_samples = 10_000
        self.reject_first = False
        self.body: bytes | None = None
        self.app.add_api_route("/v1/samples", self.receive, methods=["POST"])

    @property
    def times(self) -> list[float]:
        return [sample.t_s for sample in self.samples]

    async def receive(self, request: Request) -> Response:
        samples = json.loads(await request.body())["samples"]
        self.batch_sizes.append(len(samples))
        if self.status != 200:
            return Response(json.dumps({"message": "not now"}), status_code=self.status)
        if len(samples) > self.max_samples:
            return Response(status_code=413)
        self.samples += [LoadSample.model_validate(s) for s in samples]
        rejected = [RejectedSample(index=0, reason="stale")] if self.reject_first else []
        receipt = SampleReceipt(accepted=len(samples) - len(rejected), rejected=rejected)
        return Response(self.body or receipt.model_dump_json(), media_type="application/json")


class Bench:
    """A pusher, its receiver, and what the pusher reported."""

    def __init__(self, client: httpx.AsyncClient, receiver: Receiver, *, capacity: int) -> None:
        self.receiver = receiver
        self.outcomes: Counter[PushOutcome] = Counter()
        self.dropped: Counter[DropReason] = Counter()
        self.pusher = Pusher(
            client,
            interval_s=0.01,
            capacity=capacity,
            timeout_s=2.0,
            on_push=lambda outcome: self.outcomes.update([outcome]),
            on_drop=lambda reason, num: self.dropped.update({reason: num}),
            max_backoff_s=0.05,
        )

    def offer(self, *times_s: float) -> None:
        for t_s in times_s:
            self.pusher.offer(sample(t_s))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        exit_event = asyncio.Event()
        task = asyncio.create_task(self.pusher.run(exit_event))
        try:
            yield
        finally:
            exit_event.set()
            await asyncio.wait_for(task, 5.0)


def on_bench(body: Callable[[Bench], Awaitable[None]], *, capacity: int = 1000) -> None:
    async def run() -> None:
        receiver = Receiver()
        transport = httpx.ASGITransport(receiver.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://controller") as client:
            await body(Bench(client, receiver, capacity=capacity))

    asyncio.run(run())


def test_samples_arrive_in_order_and_in_batches() -> None:
    async def body(bench: Bench) -> None:
        bench.offer(1, 2, 3)
        async with bench.running():
            await until(lambda: len(bench.receiver.times) == 3, "first batch")
            bench.offer(4)
            await until(lambda: len(bench.receiver.times) == 4, "second batch")
        assert bench.receiver.times == [1, 2, 3, 4]
        assert bench.receiver.batch_sizes == [3, 1]
        assert bench.outcomes == {PushOutcome.OK: 2}
        assert not bench.dropped

    on_bench(body)


def test_one_sample_in_five_seconds_carries_the_forecast() -> None:
    async def body(bench: Bench) -> None:
        point = ForecastPoint(
            horizon_s=1.0, arrivals_per_s=1.0, arrivals_per_s_q10=0.0, arrivals_per_s_q50=1.0, arrivals_per_s_q90=2.0
        )
        full = sample(0.0).model_copy(update={"forecast": (point,)})
        # A server without a forecast yet, then one second each, then a clock that was set back.
        bench.offer(98, 99)
        for t_s in (100, 101, 104.9, 105, 109, 110.5, 50, 51, 55):
            bench.pusher.offer(full.model_copy(update={"t_s": t_s}))
        async with bench.running():
            await until(lambda: len(bench.receiver.samples) == 11, "delivery")
        assert [s.t_s for s in bench.receiver.samples if s.forecast] == [100, 105, 110.5, 50, 55]
        assert {s.forecast for s in bench.receiver.samples} == {(), (point,)}

    on_bench(body)


@pytest.mark.parametrize("status", [500, 503, 429, 401, 404])
def test_an_error_that_may_pass_keeps_the_samples(status: int) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.status = status
        bench.offer(1, 2)
        async with bench.running():
            await until(lambda: bench.outcomes[PushOutcome.HTTP_ERROR] >= 3, "three failures")
            bench.offer(3)
            bench.receiver.status = 200
            await until(lambda: len(bench.receiver.times) == 3, "delivery")
        assert bench.receiver.times == [1, 2, 3]
        assert not bench.dropped

    on_bench(body)


@pytest.mark.parametrize("status", [400, 422])
def test_a_batch_that_will_never_be_taken_is_dropped_and_counted(status: int) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.status = status
        bench.offer(1, 2)
        async with bench.running():
            await until(lambda: bench.outcomes[PushOutcome.REFUSED] == 1, "refusal")
            bench.receiver.status = 200
            bench.offer(3)
            await until(lambda: bench.receiver.times == [3], "the next batch")
        assert bench.dropped == {DropReason.REFUSED: 2}

    on_bench(body)


def test_a_batch_that_is_too_large_is_cut() -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.max_samples = 3
        bench.offer(*range(10))
        async with bench.running():
            await until(lambda: len(bench.receiver.times) == 10, "all samples")
        assert bench.receiver.times == list(range(10))
        assert not bench.dropped

    on_bench(body)


def test_a_sample_that_is_always_too_large_is_dropped() -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.max_samples = 0
        bench.offer(1, 2)
        async with bench.running():
            await until(lambda: bench.dropped[DropReason.REFUSED] == 2, "both dropped")

    on_bench(body)


def test_rejected_samples_are_counted_and_not_sent_again() -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.reject_first = True
        bench.offer(1, 2, 3)
        async with bench.running():
            await until(lambda: bench.outcomes[PushOutcome.OK] == 1, "one push")
        assert bench.dropped == {DropReason.REFUSED: 1}
        assert bench.receiver.times == [1, 2, 3]

    on_bench(body)


def test_an_answer_that_is_no_receipt_keeps_the_samples() -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.body = b"<html>hello</html>"
        bench.offer(1)
        async with bench.running():
            await until(lambda: bench.outcomes[PushOutcome.BAD_RECEIPT] >= 2, "two tries")
            bench.receiver.body = None
            await until(lambda: bench.outcomes[PushOutcome.OK] == 1, "delivery")
        assert not bench.dropped

    on_bench(body)


def test_a_full_queue_drops_the_oldest_and_counts_them() -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.status = 503
        bench.offer(*range(5))
        assert not await bench.pusher.push_once()
        bench.offer(*range(5, 20))
        assert len(bench.pusher) == 8
        assert bench.dropped == {DropReason.QUEUE_FULL: 12}
        bench.receiver.status = 200
        assert await bench.pusher.push_once()
        assert bench.receiver.times == list(range(12, 20))

    on_bench(body, capacity=8)


def test_what_is_queued_at_the_end_is_pushed_once_more() -> None:
    async def body(bench: Bench) -> None:
        async with bench.running():
            bench.offer(1)
        assert bench.receiver.times == [1]

    on_bench(body)


class Fleet(httpx.AsyncBaseTransport):
    """Several controllers by host name; those without an application refuse connections."""

    def __init__(self, **receivers: Receiver | None) -> None:
        self.asked: list[str] = []
        self._by_host = {
            host: httpx.ASGITransport(receiver.app) if receiver is not None else None
            for host, receiver in receivers.items()
        }

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        transport = self._by_host[request.url.host]
        if transport is None:
            raise httpx.ConnectError("refused")
        return await transport.handle_async_request(request)


def push_to(fleet: Fleet, body: Callable[[Pusher], Awaitable[None]], *urls: str) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(transport=fleet) as client:
            pusher = Pusher(
                client,
                interval_s=0.01,
                capacity=100,
                timeout_s=2.0,
                on_push=lambda outcome: None,
                on_drop=lambda reason, num: None,
                urls=urls,
            )
            await body(pusher)

    asyncio.run(run())


@pytest.mark.parametrize(("failing", "status"), [("standby", 503), ("standby", 502), ("standby", 504), ("dead", 0)])
def test_a_controller_that_does_not_lead_is_left_for_the_next_and_nothing_is_lost(failing: str, status: int) -> None:
    standby, leader = Receiver(), Receiver()
    standby.status = status
    fleet = Fleet(standby=standby, dead=None, leader=leader)

    async def body(pusher: Pusher) -> None:
        pusher.offer(sample(1))
        assert not await pusher.push_once()
        pusher.offer(sample(2))
        assert await pusher.push_once()
        pusher.offer(sample(3))
        assert await pusher.push_once()

    push_to(fleet, body, f"http://{failing}", "http://leader")
    assert leader.times == [1, 2, 3]
    assert fleet.asked == [failing, "leader", "leader"]


def test_an_error_that_any_controller_would_answer_is_no_reason_to_leave_it() -> None:
    receiver = Receiver()
    receiver.status = 401
    fleet = Fleet(one=receiver, other=Receiver())

    async def body(pusher: Pusher) -> None:
        pusher.offer(sample(1))
        for _ in range(2):
            assert not await pusher.push_once()

    push_to(fleet, body, "http://one", "http://other")
    assert fleet.asked == ["one", "one"]


def test_the_pause_grows_only_once_every_controller_has_failed() -> None:
    fleet = Fleet(a=None, b=None)

    async def body(pusher: Pusher) -> None:
        pusher.offer(sample(1))
        await pusher.push_once()
        assert pusher._pause_s() == pusher._interval_s
        for _ in range(9):
            await pusher.push_once()
        assert pusher._pause_s() > pusher._interval_s

    push_to(fleet, body, "http://a", "http://b")
