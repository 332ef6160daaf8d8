"""Batches of samples on their way into the state: one batch at a time, and a few milliseconds of it at a time.

A tick or a long poll waits for no more than that, and a tick that has begun for none of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from controller.clock import Clock, correction_of
from controller.dashboard.recent import Recent
from controller.ingest import read_batch
from controller.lab import Lab
from controller.metrics import Metrics
from controller.right_of_way import RightOfWay
from controller.samples import SampleOutcome
from controller.schema import RejectedSample, SampleReceipt
from controller.state import FleetState
from sidecar.schema import LoadSample

SAMPLES_AT_ONCE = 50
"""Some two milliseconds: to read one, check it and pass it on takes up to forty microseconds."""
MAX_DETAIL = 500


class Fleet(Protocol):
    """What a controller has; another state after the lead was lost and won again."""

    metrics: Metrics
    clock: Clock
    right_of_way: RightOfWay

    @property
    def state(self) -> FleetState: ...

    @property
    def lab(self) -> Lab: ...

    @property
    def recent(self) -> Recent: ...


class Intake:
    """Judges samples, and passes the good ones on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = asyncio.Lock()

    async def take(self, body: bytes) -> SampleReceipt:
        """Judge each sample of a batch alone; the good ones wait for a commit then.

        Raises:
            InputError: the body is no batch.
        """
        rejected: list[RejectedSample] = []
        async with self._turn:
            await self._fleet.right_of_way.give()
            samples = read_batch(body)
            correction_s = correction_of(self._fleet.clock)
            for first in range(0, len(samples), SAMPLES_AT_ONCE):
                await self._fleet.right_of_way.give()
                part = samples[first : first + SAMPLES_AT_ONCE]
                refused = self._take_part(part, correction_s=correction_s, first=first)
                rejected += refused
        outcomes = Counter([one.reason for one in rejected])
        outcomes[SampleOutcome.ACCEPTED] = accepted = len(samples) - len(rejected)
        for outcome, number in outcomes.items():
            if number:
                self._fleet.metrics.samples.labels(outcome).inc(number)
        return SampleReceipt(accepted=accepted, rejected=rejected)

    def _take_part(self, part: Sequence[object], *, correction_s: float, first: int) -> list[RejectedSample]:
        """Those that do not count, numbered from ``first`` on."""
        offer, now_s = self._fleet.state.samples.offer, self._fleet.clock()
        accepted: list[LoadSample] = []
        refused: list[RejectedSample] = []
        for index, raw in enumerate(part, first):
            verdict = offer(raw, now_s, correction_s=correction_s)
            if verdict.outcome is SampleOutcome.ACCEPTED and verdict.sample is not None:
                accepted.append(verdict.sample)
            else:
                detail = verdict.detail[:MAX_DETAIL]
                refused.append(RejectedSample(index=index, reason=verdict.outcome, detail=detail))
        self._pass_on(accepted)
        return refused

    def _pass_on(self, samples: Sequence[LoadSample]) -> None:
        """To all who follow them, before anybody else can commit them."""
        state, history = self._fleet.state, self._fleet.recent.history
        for sample in samples:
            history.add(sample)
            state.costs.offer(sample)
            if state.sample_log.is_due(sample):
                body = sample.model_dump_json(exclude_none=True)
                state.journal.append("samples", (sample.server_id, sample.t_s, body))
                state.journal.put("servers", sample.server_id, body)
        self._fleet.lab.observe(samples)
