"""The live experiment: the same requests against the same servers, once per policy, seed and draw."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from controller.schema import BudgetSpec, Fleet, PolicySpec, RoundRecord
from replay.config import DRAWING_POLICY, ReplaySettings, policy_spec
from replay.fleet import FleetSpec, Server, TrainingFleet
from replay.loadgen import PlannedRequest, RequestResult, ServerInfo, Status, run_load
from replay.processes import Children, free_ports
from replay.requests_file import write_requests
from replay.slo import latency, violates
from replay.summarize import TrainingOutcome, summarize_run
from replay.summary import Run
from replay.timeline import LoadPoint, RequestPoint, RunTimeline, StepPoint, SyncWindow
from service.errors import UnavailableError
from sidecar.slo import Slo, parse_slo

logger = logging.getLogger(__name__)

NO_TRAINING = "no_training"
RUNS = "runs"
"""Directory of the logs and the state of every run, within the output directory."""
OBSERVE_PERIOD_S = 0.5
GONE_AFTER_REFUSALS = 5
LEAD_S = 1.0
"""From putting the policy in force to the first arrival: the generator's tasks are ready by then."""
SETTLE_S = 20.0
"""Longest wait after the load for a sync in flight to end, so that its cost and effect are counted."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of the experiment."""

    policy: str
    seed: int
    draw: int

    @property
    def name(self) -> str:
        return f"{self.policy}-seed{self.seed}-draw{self.draw}"


def plan_runs(settings: ReplaySettings) -> list[RunSpec]:
    """Every run, in an order that rotates with the seed: what drifts on the machine then hits all policies alike."""
    policies = (NO_TRAINING,) if settings.no_train else settings.policies
    return [
        RunSpec(policy, seed, draw)
        for seed in range(settings.seeds)
        for policy in (*policies[seed % len(policies) :], *policies[: seed % len(policies)])
        for draw in range(settings.draws if policy == DRAWING_POLICY else 1)
    ]


@dataclass(slots=True)
class Observation:
    """What was seen while a run was on. Times count from the start of the load."""

    load: list[LoadPoint] = field(default_factory=list)
    steps: list[StepPoint] = field(default_factory=list)
    first: Fleet | None = None
    horizon: Fleet | None = None
    """At the end of the slice: every policy trains for the same time."""
    last: Fleet | None = None
    """After the sync that was in flight then."""

    def add(self, fleet: Fleet, t_s: float) -> None:
        self.first = self.first or fleet
        self.last = fleet
        running = [server.sample.running or 0.0 for server in fleet.servers if server.known]
        waiting = [server.sample.waiting or 0.0 for server in fleet.servers if server.known]
        if running:
            self.load.append(LoadPoint(t_s, sum(running), sum(waiting)))
        self.steps.append(StepPoint(t_s, total_steps(fleet)))


@dataclass(frozen=True, slots=True)
class RunOutcome:
    run: Run
    timeline: RunTimeline


@dataclass(frozen=True, slots=True)
class Progress:
    """For whoever watches: how far a run is."""

    spec: RunSpec
    stage: str
    elapsed_s: float = 0.0
    duration_s: float = 0.0
    answered: int = 0
    violations: int = 0
    steps: int = 0
    loss: float | None = None
    syncs: int = 0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one seed."""

    requests: tuple[PlannedRequest, ...]
    duration_s: float


async def run_once(
    spec: RunSpec,
    workload: Workload,
    *,
    settings: ReplaySettings,
    servers: tuple[Server, ...],
    infos: tuple[ServerInfo, ...],
    children: Children,
    on_progress: OnProgress,
) -> RunOutcome:
    """One policy under one seed's traffic, with a training fleet of its own.

    Raises:
        ChildFailedError: one of the processes ended.
    """
    directory = settings.out / RUNS / spec.name
    async with _training(spec, settings, servers, children, directory, on_progress) as fleet:
        if fleet is not None:
            fleet.begin(*_orders(spec, settings))
        watch = _Watch(spec, workload, slo=parse_slo(settings.slo), fleet=fleet, children=children, notify=on_progress)
        started_unix_s = time.time() + LEAD_S
        results = await watch.run(infos, settings)
        await asyncio.to_thread(write_requests, directory, results)
        rounds = await watch.settle() if fleet is not None else []
    return _conclude(spec, watch, results, rounds, started_unix_s=started_unix_s)


def fleet_spec(spec: RunSpec, settings: ReplaySettings, servers: tuple[Server, ...]) -> FleetSpec:
    count = settings.islands or len(servers)
    cores: list[int | None] = [servers[index % len(servers)].core for index in range(count)]
    if settings.island_cores:
        cores = [settings.island_cores[index % len(settings.island_cores)] for index in range(count)]
    return FleetSpec(
        servers=servers,
        island_cores=tuple(cores),
        slo=settings.slo,
        busy_requests=settings.busy_requests,
        scrape_interval_s=settings.scrape_interval_s,
        min_h=settings.min_h,
        max_h=settings.max_h,
        seed=spec.seed,
        train_options=tuple(settings.train_options.items()),
    )


@contextlib.asynccontextmanager
async def _training(
    spec: RunSpec,
    settings: ReplaySettings,
    servers: tuple[Server, ...],
    children: Children,
    directory: Path,
    on_progress: OnProgress,
) -> AsyncIterator[TrainingFleet | None]:
    if spec.policy == NO_TRAINING:
        yield None
        return
    on_progress(Progress(spec, "starting islands"))
    wanted = fleet_spec(spec, settings, servers)
    ports = free_ports(wanted.num_ports, settings.port_range)
    fleet = TrainingFleet(wanted, children=children, directory=directory, ports=ports)
    try:
        await fleet.start()
        yield fleet
    finally:
        fleet.stop()


def _orders(spec: RunSpec, settings: ReplaySettings) -> tuple[PolicySpec, BudgetSpec]:
    budget = BudgetSpec(
        outer_syncs=settings.outer_syncs, horizon_s=settings.duration_s + LEAD_S, min_gap_s=settings.min_gap_s
    )
    policy = policy_spec(spec.policy, settings.policy_params, seed=spec.seed, draw=spec.draw)
    return policy, budget


class _Watch:
    """Runs the load of one run and looks at the fleet meanwhile."""

    def __init__(
        self,
        spec: RunSpec,
        workload: Workload,
        *,
        slo: Slo,
        fleet: TrainingFleet | None,
        children: Children,
        notify: OnProgress,
    ) -> None:
        self.observation = Observation()
        self.slo = slo
        self.workload = workload
        self._spec = spec
        self._fleet = fleet
        self._children = children
        self._notify = notify
        self._answered = self._violations = 0
        self._refused_in_a_row: dict[int, int] = {}
        self._start_s = 0.0

    async def run(self, infos: tuple[ServerInfo, ...], settings: ReplaySettings) -> list[RequestResult]:
        self._start_s = time.monotonic() + LEAD_S
        load = asyncio.create_task(
            run_load(
                self.workload.requests,
                [info.url for info in infos],
                model=infos[0].model,
                timeout_s=settings.request_timeout_s,
                start_at_monotonic_s=self._start_s,
                on_result=self._count,
                api_key=settings.api_key_text,
            )
        )
        try:
            # The horizon belongs to the run even when the last request ends early.
            while not load.done() or time.monotonic() < self._start_s + self.workload.duration_s:
                await self._look("replaying")
                self._check_servers(infos)
                await asyncio.sleep(OBSERVE_PERIOD_S)
            self.observation.horizon = self.observation.last
            return await load
        finally:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load

    async def settle(self) -> list[RoundRecord]:
        """Wait for a round in flight, then read the last state."""
        assert self._fleet is not None
        deadline = time.monotonic() + SETTLE_S
        while True:
            rounds = await asyncio.to_thread(self._fleet.rounds)
            if all(record.closed for record in rounds) or time.monotonic() > deadline:
                await self._look("done")
                return rounds
            await self._look("finishing the last sync")
            await asyncio.sleep(OBSERVE_PERIOD_S)

    def _check_servers(self, infos: tuple[ServerInfo, ...]) -> None:
        """A server that is gone makes the rest of the experiment worthless: say so instead of counting violations."""
        for index, refused in self._refused_in_a_row.items():
            if refused >= GONE_AFTER_REFUSALS:
                raise UnavailableError(
                    f"{infos[index].url} refused {refused} requests in a row: it is gone",
                    field="server",
                    remedy="start it again, then the replay; the runs before this one are in the report",
                )

    def _count(self, result: RequestResult) -> None:
        self._answered += 1
        self._violations += violates(result, self.slo)
        refused = result.status is Status.REFUSED
        self._refused_in_a_row[result.server_index] = refused * (self._refused_in_a_row.get(result.server_index, 0) + 1)

    async def _look(self, stage: str) -> None:
        self._children.check()
        elapsed_s = time.monotonic() - self._start_s
        fleet = None
        if self._fleet is not None:
            try:
                fleet = await asyncio.to_thread(self._fleet.fleet)
            except (httpx.HTTPError, UnavailableError) as exc:
                logger.warning("controller did not answer, that look is missing error=%s", exc)
        if fleet is not None:
            self.observation.add(fleet, elapsed_s)
        last = self.observation.last
        self._notify(
            Progress(
                self._spec,
                stage,
                elapsed_s=elapsed_s,
                duration_s=self.workload.duration_s,
                answered=self._answered,
                violations=self._violations,
                steps=total_steps(last) if last else 0,
                loss=mean_loss(last) if last else None,
                syncs=last.rounds_closed if last else 0,
            )
        )


def total_steps(fleet: Fleet) -> int:
    return sum(island.progress.step for island in fleet.islands if island.progress)


def total_tokens(fleet: Fleet) -> int:
    return sum(island.progress.tokens for island in fleet.islands if island.progress)


def mean_loss(fleet: Fleet) -> float | None:
    losses = [island.progress.loss for island in fleet.islands if island.progress and island.progress.loss is not None]
    return sum(losses) / len(losses) if losses else None


def sync_windows(rounds: list[RoundRecord], *, started_unix_s: float) -> Iterator[SyncWindow]:
    """When each island was in a sync. In synchronous mode all of them are, from the first push to the last pull."""
    for record in rounds:
        if record.started_s is None or record.finished_s is None:
            continue
        for slot in record.slots_applied:
            yield SyncWindow(record.started_s - started_unix_s, record.finished_s - started_unix_s, slot)


def _conclude(
    spec: RunSpec, watch: _Watch, results: list[RequestResult], rounds: list[RoundRecord], *, started_unix_s: float
) -> RunOutcome:
    seen = watch.observation
    windows = tuple(sync_windows(rounds, started_unix_s=started_unix_s))
    training = TrainingOutcome()
    if seen.first is not None and seen.horizon is not None and seen.last is not None:
        training = TrainingOutcome(
            outer_syncs=sum(1 for record in rounds if record.slots_applied),
            inner_steps=total_steps(seen.horizon) - total_steps(seen.first),
            tokens_trained=total_tokens(seen.horizon) - total_tokens(seen.first),
            first_loss=mean_loss(seen.first),
            final_loss=mean_loss(seen.last),
            sync_windows=windows,
        )
    run = summarize_run(
        results,
        policy=spec.policy,
        seed=spec.seed,
        draw=spec.draw,
        slo=watch.slo,
        training=training,
        started_unix_s=started_unix_s,
    )
    return RunOutcome(run, _timeline(spec, watch, results, windows))


def _timeline(
    spec: RunSpec, watch: _Watch, results: list[RequestResult], windows: tuple[SyncWindow, ...]
) -> RunTimeline:
    points = []
    for result in results:
        judged_s = latency(result, watch.slo.main.metric)
        latency_ms = None if judged_s is None else judged_s * 1e3
        points.append(RequestPoint(result.arrival_s, latency_ms, violates(result, watch.slo)))
    return RunTimeline(
        label=spec.name,
        duration_s=watch.workload.duration_s,
        requests=tuple(points),
        load=tuple(watch.observation.load),
        steps=tuple(watch.observation.steps),
        syncs=windows,
    )
