"""A fleet as the controller sees it: relays that push samples, islands that beat and poll, over bare HTTP/1.1.

Bodies are put together from bytes, so that a thousand islands and ten thousand sidecars cost the machine little and
the controller is what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sidecar.push import FORECAST_PERIOD_S

HORIZONS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)
PUSH_PERIOD_S = 1.0
POLL_S = 20.0
ANSWER_DEADLINE_S = 60.0
RECONNECT_S = 0.2


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    at_s: float
    """Unix time at which its last bytes came, however long this process then had other things to do."""


class Wire(asyncio.Protocol):
    """One connection; one answer at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._wanted: asyncio.Future[Answer] | None = None
        self.is_lost = False

    def wait(self) -> asyncio.Future[Answer]:
        self._wanted = asyncio.get_running_loop().create_future()
        return self._wanted

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = bytes(self._received).partition(b"\r\n\r\n")
        if not end:
            return
        lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        if len(rest) < length or self._wanted is None or self._wanted.done():
            return
        self._received.clear()
        self._wanted.set_result(Answer(int(lines[0].split()[1]), rest, time.time()))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_exception(exc or ConnectionResetError("the controller closed the connection"))


class Connection:
    """One keep-alive connection."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._wire: Wire | None = None
        self._transport: asyncio.Transport | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Raises `OSError` (no connection, or it broke) or `TimeoutError`."""
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            if self._wire is not None:
                # A server ends a connection that was idle for long just when it is used again.
                with contextlib.suppress(OSError):
                    return await self._ask(method, path, body)
            return await self._ask(method, path, body)

    async def _ask(self, method: str, path: str, body: bytes) -> Answer:
        if self._wire is None or self._wire.is_lost:
            self._transport, self._wire = await asyncio.get_running_loop().create_connection(
                Wire, self._host, self._port
            )
        assert self._transport is not None
        head = f"{method} {path} HTTP/1.1\r\nHost: c\r\nContent-Length: {len(body)}\r\n"
        kind = "Content-Type: application/json\r\n" if body else ""
        try:
            answer = self._wire.wait()
            self._transport.write(f"{head}{kind}\r\n".encode() + body)
            return await answer
        except BaseException:  # cut off, or given up: a late answer must not be taken for that of the next request
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = self._wire = None


@dataclass(slots=True)
class Seen:
    """What came back."""

    samples_sent: int = 0
    samples_accepted: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    pushes_failed: int = 0
    push_s: list[float] = field(default_factory=list)
    beats: int = 0
    beats_failed: int = 0
    directive_s: list[float] = field(default_factory=list)
    """From the decision's time to the moment at which the island had the directive."""
    polls_failed: int = 0
    syncs: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@dataclass(frozen=True, slots=True)
class SampleBody:
    """A server's sample as bytes before and after its time, with all that a sidecar says."""

    before: bytes
    after: bytes
    after_with_forecast: bytes


def sample_bodies(first: int, count: int, rng: random.Random) -> list[SampleBody]:
    return [_to_body(_sample(number, rng)) for number in range(first, first + count)]


def _sample(number: int, rng: random.Random) -> dict[str, Any]:
    rate = rng.uniform(0.0, 8.0)
    points = [
        {
            "horizon_s": horizon_s,
            "arrivals_per_s": round(rate, 4),
            "arrivals_per_s_q10": 0.0,
            "arrivals_per_s_q50": round(rate * 0.8, 4),
            "arrivals_per_s_q90": round(rate * 2, 4),
            "running": round(rate * 0.5, 4),
            "running_q90": round(rate, 4),
            "method": "simple",
            "burst_probability": 0.1,
            "burst_arrivals": round(rate * 2 * horizon_s, 2),
        }
        for horizon_s in HORIZONS_S
    ]
    costs = [{"start_s": start_s, "violations": round(rate * 0.05, 5)} for start_s in (0.0, *HORIZONS_S)]
    return {
        "server_id": f"vllm-{number:05d}",
        "node": f"host-{number:05d}",
        "t_s": -1.0,
        "interval_s": 1.0,
        "state": "ready",
        "running": round(rate / 2),
        "waiting": 0,
        "kv_usage_frac": 0.2,
        "arrivals": round(rate),
        "finished": round(rate),
        "prompt_tokens": 400,
        "generation_tokens": 90,
        "preemptions": 0,
        "ttft_mean_s": 0.05,
        "itl_mean_s": 0.01,
        "e2e_mean_s": 0.4,
        "slo_requests": round(rate),
        "slo_violations": 0,
        "slo_violations_upper": 0,
        "pressure_frac": round(rate / 8, 4),
        "trainer_phase": "inner",
        "forecast": points,
        "sync_cost_per_s": round(rate * 0.05, 5),
        "sync_costs_ahead": costs,
    }


def _to_body(sample: dict[str, Any]) -> SampleBody:
    before, _, full = json.dumps(sample).encode().partition(b'"t_s": -1.0')
    _, _, bare = json.dumps({**sample, "forecast": []}).encode().partition(b'"t_s": -1.0')
    return SampleBody(before + b'"t_s": ', bare, full)


async def relay(connection: Connection, bodies: list[SampleBody], seen: Seen, end_s: float) -> None:
    """Push one sample of each server per second; what was not answered is sent again, as a sidecar would.

    Each server's forecast goes along as often as a sidecar sends it.
    """
    due_s = time.monotonic() + random.uniform(0, PUSH_PERIOD_S)
    forecast_every = round(FORECAST_PERIOD_S / PUSH_PERIOD_S)
    for push in itertools.count():
        if due_s >= end_s:
            return
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        stamp = f"{time.time():.6f}".encode()
        samples = [
            body.before + stamp + (body.after if (push + place) % forecast_every else body.after_with_forecast)
            for place, body in enumerate(bodies)
        ]
        body = b'{"samples": [' + b", ".join(samples) + b"]}"
        seen.samples_sent += len(bodies)
        accepted = await _push(connection, body, seen, end_s)
        seen.samples_accepted += accepted
        due_s = max(due_s + PUSH_PERIOD_S, time.monotonic())


async def _push(connection: Connection, body: bytes, seen: Seen, end_s: float) -> int:
    while True:
        began_s = time.time()
        with contextlib.suppress(OSError, TimeoutError):
            answer = await connection.ask("POST", "/v1/samples", body)
            if answer.status == 200:
                seen.push_s.append(answer.at_s - began_s)
                receipt = json.loads(answer.body)
                seen.refusals.update(refused["reason"] for refused in receipt["rejected"])
                return int(receipt["accepted"])
        seen.pushes_failed += 1
        if time.monotonic() > end_s + ANSWER_DEADLINE_S:
            return 0
        await asyncio.sleep(RECONNECT_S)


@dataclass(slots=True)
class Island:
    """One agent: registers, beats, polls, and reports each sync that it is told to do as done at once."""

    number: int
    server: int
    host: str
    port: int
    steps_per_s: float = 4.0
    epoch: int = 0
    seq: int = 0
    beat_s: float = 1.0
    step: int = 0
    since: int = 0
    version: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"island-{self.number:04d}"

    async def join(self, connection: Connection) -> None:
        body = {
            "agent_id": self.name,
            "instance": "bench",
            "node": f"host-{self.server:05d}",
            "server_id": f"vllm-{self.server:05d}",
            "slot": self.number,
        }
        answer = await connection.ask("POST", "/v1/agents", json.dumps(body).encode())
        assert answer.status == 200, answer
        lease = json.loads(answer.body)
        self.epoch, self.seq, self.beat_s = lease["epoch"], lease["directive_seq"], lease["heartbeat_interval_s"]

    async def beat_until(self, connection: Connection, seen: Seen, end_s: float) -> None:
        due_s = time.monotonic() + random.uniform(0, self.beat_s)
        while due_s < end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._beat(connection, seen)
            due_s = max(due_s + self.beat_s, time.monotonic())

    async def _beat(self, connection: Connection, seen: Seen) -> None:
        grown = round(self.steps_per_s * self.beat_s)
        self.step, self.since = self.step + grown, self.since + grown
        reports, self.reports = self.reports, []
        body = {
            "instance": "bench",
            "epoch": self.epoch,
            "t_s": time.time(),
            "progress": {
                "phase": "inner",
                "step": self.step,
                "inner_steps_since_sync": self.since,
                "tokens": self.step * 1024,
                "tokens_since_sync": self.since * 1024,
                "loss": 3.0,
                "loss_at_sync": 3.1,
                "step_time_s": 1 / self.steps_per_s,
                "round": self.version,
            },
            "syncs": reports,
        }
        try:
            path = f"/v1/agents/{self.name}/heartbeat"
            answer = await connection.ask("POST", path, json.dumps(body).encode())
        except (OSError, TimeoutError):
            seen.beats_failed += 1
            self.reports = reports + self.reports
            return
        if answer.status == 200:
            seen.beats += 1
            self.epoch = json.loads(answer.body)["epoch"]
        else:
            seen.beats_failed += 1

    async def poll_until(self, connection: Connection, seen: Seen, end_s: float) -> None:
        while (left_s := end_s - time.monotonic()) > 0:
            wait_s = max(0.1, min(POLL_S, left_s))
            query = f"instance=bench&after={self.seq}&wait_s={wait_s:.1f}"
            try:
                answer = await connection.ask("GET", f"/v1/agents/{self.name}/directives?{query}")
            except (OSError, TimeoutError):
                seen.polls_failed += 1
                await asyncio.sleep(RECONNECT_S)
                continue
            if answer.status != 200:
                seen.polls_failed += 1
                await asyncio.sleep(RECONNECT_S)
                continue
            found = json.loads(answer.body)
            self.seq = found["seq"]
            for directive in found["directives"]:
                seen.directive_s.append(answer.at_s - directive["t_s"])
                if directive["kind"] == "sync":
                    self._sync(directive, answer.at_s, seen)

    def _sync(self, directive: dict[str, Any], at_s: float, seen: Seen) -> None:
        seen.syncs += 1
        self.reports.append(
            {
                "round": directive["round"],
                "outcome": "applied",
                "started_s": at_s,
                "pushed_s": at_s + 0.01,
                "finished_s": at_s + 0.02,
                "bytes_pushed": 1 << 20,
                "bytes_pulled": 1 << 20,
                "inner_steps": self.since,
                "tokens": self.since * 1024,
            }
        )
        self.since = 0
        self.version = max(self.version, directive["round"] + 1)
