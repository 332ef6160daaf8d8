"""One server with bursts of load and one island, second by second, against the real controller in this process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from controller.schema import Directive, DirectiveKind
from diloco.schema import Phase
from tests.controller.helpers import Client, ManualClock, progress, report, sample

SYNC_S = 2
BUSY_REQUESTS, IDLE_REQUESTS = 20, 2
BASE_RATE = 0.02
SYNC_RATE = {True: 0.6, False: 0.05}
"""P(violation) while a sync runs, by whether the server is busy."""


@dataclass
class SimFleet:
    """A request violates the SLO more often while a sync runs, and far more often in a burst."""

    client: Client
    clock: ManualClock
    seed: int = 0
    step: int = 1000
    round: int = 0
    h: int = 0
    seen: int = 0
    """Number of the last directive."""
    epoch: int = 1
    started_s: float | None = None
    """When the running sync began."""
    starts_s: list[float] = field(default_factory=list)
    costs: dict[int, float] = field(default_factory=dict)
    """Second → what a sync would have cost in it."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.busy, self.left_s = False, 0

    async def register(self) -> None:
        lease = await self.client.register(server_id="vllm-0")
        self.seen = lease.directive_seq

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            await self.second()

    async def second(self) -> None:
        self.clock.advance(1.0)
        await self._serve()
        await self._train()
        await self.client.loop.tick()
        await self._obey()

    async def _serve(self) -> None:
        if self.left_s == 0:
            self.busy, self.left_s = not self.busy, self.rng.randint(3, 6)
        self.left_s -= 1
        requests = BUSY_REQUESTS if self.busy else IDLE_REQUESTS
        in_sync = self.started_s is not None
        rate = SYNC_RATE[self.busy] if in_sync else BASE_RATE
        self.costs[int(self.clock.now_s) - 1] = requests * (SYNC_RATE[self.busy] - BASE_RATE)
        told: dict[str, Any] = {
            "interval_s": 1.0,
            "pressure_frac": 0.9 if self.busy else 0.1,
            "slo_requests": requests,
            "slo_violations": sum(self.rng.random() < rate for _ in range(requests)),
            "trainer_phase": "sync" if in_sync else "inner",
        }
        batch = {"samples": [sample("vllm-0", self.clock.now_s, **told)]}
        receipt = await self.client.http.post("/v1/samples", json=batch)
        assert receipt.json()["accepted"] == 1, receipt.text

    async def _train(self) -> None:
        now_s = self.clock.now_s
        if self.started_s is None:
            self.step, self.h = self.step + 1, self.h + 1
            await self._beat(Phase.INNER)
        elif now_s < self.started_s + SYNC_S:
            await self._beat(Phase.SYNC)
        else:
            done = report(self.round, started_s=self.started_s, pushed_s=self.started_s + 1, finished_s=now_s)
            self.round, self.h, self.started_s = self.round + 1, 0, None
            await self._beat(Phase.INNER, syncs=[done])

    async def _beat(self, phase: Phase, **fields: Any) -> None:
        told = progress(self.h, step=self.step, round=self.round, phase=phase, step_time_s=1.0)
        await self.client.beat(epoch=self.epoch, progress=told, **fields)

    async def _obey(self) -> None:
        answer = await self.client.directives(after=self.seen, wait_s=0)
        self.seen = answer["seq"]
        orders = [Directive.model_validate(body) for body in answer["directives"]]
        if any(order.kind is DirectiveKind.SYNC and order.round == self.round for order in orders):
            self.started_s = self.clock.now_s
            self.starts_s.append(self.clock.now_s)

    def series(self, server_ids: Any, *, since_s: float, until_s: float) -> tuple[float | None, ...]:
        """As a `CostSource`."""
        assert list(server_ids) == ["vllm-0"]
        return tuple(self.costs.get(second) for second in range(int(since_s), int(until_s)))
