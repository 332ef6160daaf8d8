"""The sidecar as an HTTP application: its tasks, scrape, push and save, and what they know under ``/v1``.

No task depends on another, and health depends on neither the server nor the controller: a sidecar whose server
is down is ready, it says DOWN.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

import httpx
from fastapi import FastAPI, Query

from service.app import build_app
from service.client import client_options
from service.errors import ConflictError
from service.repeats import Repeats
from service.tasks import Background, every, wait_for_exit
from sidecar.calibration_file import RECORDED_REQUESTS, read_calibration
from sidecar.calibrator import Phase
from sidecar.config import SidecarSettings
from sidecar.forecast import HORIZONS_S
from sidecar.gate import GATE_PERIOD_S, GateKeeper
from sidecar.learned import read_learned, write_learned
from sidecar.metrics import SidecarMetrics
from sidecar.observer import Observer
from sidecar.pace import Pacer
from sidecar.push import Pusher
from sidecar.schema import (
    Calibration,
    Forecast,
    GateStatus,
    Load,
    Pace,
    PaceMode,
    PaceRequest,
    ScrapeStatus,
    SloReport,
    TrainerStatus,
)
from sidecar.source.cadence import next_interval_s
from sidecar.source.parse import PageParser
from sidecar.source.ring import RingSource, overlay
from sidecar.source.scrape import Scraper
from sidecar.source.snapshot import ScrapeResult
from sidecar.source.transport import open_client, tls_context
from sidecar.trainers import TrainerWatch

logger = logging.getLogger(__name__)

DESCRIPTION = (
    "Watches one vLLM server: its load and state, a forecast, SLO accounts, and the pace for a trainer beside it."
)
# A controller that takes longer than this to take a batch is overloaded; samples wait in the queue.
PUSH_TIMEOUT_S = 3.0
SAVE_EVERY_S = 60.0
DEFAULT_SYNC_DURATION_S = 5.0
MAX_HORIZON_S = 60.0
MIN_REST = 0.5
"""Of the interval, between two scrapes."""


class Sidecar:
    """Observer, pace and queue of one server, and the tasks that feed them."""

    def __init__(self, settings: SidecarSettings) -> None:
        self.settings = settings
        self.observer = Observer(settings, t_s=time.time(), monotonic_s=time.monotonic())
        if settings.calibration is not None:
            recorded = read_calibration(settings.calibration, self.observer.slo)
            self.observer.calibrator.absorb(recorded.calibration, at_most=RECORDED_REQUESTS)
        self.pacer = Pacer()
        self.gate: GateKeeper | None = None
        self.rings: RingSource | None = None
        self.trainers: TrainerWatch | None = None
        self._repeats = Repeats(logger)
        self.metrics = SidecarMetrics(
            self.observer,
            pace=self.pace,
            num_queued=self.num_queued,
            gate=self.gate_status,
            trainers=self.trainer_status,
        )
        self.scrape_interval_s = settings.scrape_interval_s
        """Until the next scrape."""
        self.scrape: ScrapeResult | None = None
        """The newest attempt to read the page, without what the plugin knows better."""
        self._context = tls_context(settings)
        self._pusher: Pusher | None = None
        self.metrics.set_scrape_interval(self.scrape_interval_s)

    def pace(self) -> Pace:
        return self.pacer.pace(self.gate.mode if self.gate is not None else PaceMode.AUTO)

    def order_pace(self, mode: PaceMode) -> None:
        """Take an operator's order.

        Raises:
            ConflictError: there is no gate by which a trainer would hear of it.
        """
        if self.gate is not None:
            if mode is not self.gate.mode:
                logger.info("pace mode=%s was=%s", mode, self.gate.mode)
            self.gate.order(mode)
        elif mode is not PaceMode.AUTO:
            raise ConflictError(
                f"cannot {mode}: this sidecar has no gate by which a trainer would hear of it",
                field="mode",
                remedy="start it with --gate FOLDER, the WADILOCO_GATE_DIR of its server",
            )

    def gate_status(self) -> GateStatus | None:
        if self.gate is None:
            return None
        state = self.gate.state
        return GateStatus(
            busy=state.busy,
            reason=state.reason,
            source=state.source,
            in_flight=state.in_flight,
            error=self.gate.complaint or None,
        )

    def scrape_status(self) -> ScrapeStatus | None:
        if self.scrape is None:
            return None
        return ScrapeStatus(
            outcome=self.scrape.outcome,
            detail=self.scrape.explanation,
            duration_s=self.scrape.duration_s,
            interval_s=self.scrape_interval_s,
        )

    def trainer_status(self) -> TrainerStatus | None:
        return self.trainers.status() if self.trainers is not None else None

    def num_queued(self) -> int:
        return len(self._pusher) if self._pusher is not None else 0

    @asynccontextmanager
    async def run(self, _: FastAPI, tasks: Background) -> AsyncIterator[None]:
        """Start the tasks; their clients are closed when the block ends."""
        state_file = self.settings.state_file
        if state_file is not None:
            self._restore(state_file)
            tasks.start("save", lambda: self._save_all(state_file, tasks))
        async with AsyncExitStack() as clients:
            scraper = await self._open_scraper(clients)
            if self.settings.gate is not None:
                self._open_gate(self.settings.gate, clients, tasks)
            tasks.start("scrape", lambda: self._scrape_all(scraper, tasks))
            if self.settings.controllers:
                pusher = await self._open_pusher(clients, self.settings.controllers)
                self._pusher = pusher
                tasks.start("push", lambda: pusher.run(tasks.exit))
            yield

    def _restore(self, path: Path) -> None:
        learned = read_learned(path)
        if learned is None:
            return
        try:
            self.observer.restore(learned, t_s=time.time())
        except ValueError as exc:
            logger.warning("cold start: %s %s", path, exc)
        else:
            logger.info("restored file=%s age_s=%.0f", path, max(time.time() - learned.t_s, 0.0))

    async def _save_all(self, path: Path, tasks: Background) -> None:
        """Every minute, and once more at the end."""
        while not tasks.exit.is_set():
            await wait_for_exit(tasks.exit, SAVE_EVERY_S)
            sample = self.observer.sample
            if sample is None or self.observer.num_observations == 0:
                continue
            try:
                await asyncio.to_thread(write_learned, path, self.observer.export(t_s=sample.t_s))
            except OSError as exc:
                self.metrics.count_state_failure()
                logger.warning("state file not written file=%s: %s", path, exc.strerror or exc)

    async def _open_scraper(self, clients: AsyncExitStack) -> Scraper:
        timeout_s = self.settings.scrape_timeout_s
        client = await clients.enter_async_context(open_client(self.settings, self._context, timeout_s=timeout_s))
        parser = PageParser(self.settings.metric_prefix, replica=self.settings.metric_replica)
        is_socket = self.settings.vllm_socket is not None
        return Scraper(client, parser=parser, timeout_s=timeout_s, is_socket=is_socket)

    def _open_gate(self, directory: Path, clients: AsyncExitStack, tasks: Background) -> None:
        self.rings = RingSource(directory, self.observer.slo)
        clients.callback(self.rings.close)
        self.trainers = TrainerWatch(directory, now_ns=time.monotonic_ns())
        gate = self.gate = GateKeeper(directory, scrape_interval_s=self.settings.scrape_interval_s)
        clients.callback(gate.close)

        async def tick() -> None:
            now_s = time.monotonic()
            observer = self.observer
            gate.tick(self.pace(), observer.sample, age_s=now_s - observer.sample_monotonic_s, now_s=now_s)

        tasks.start("gate", lambda: every(GATE_PERIOD_S, tasks.exit, tick))

    async def _open_pusher(self, clients: AsyncExitStack, urls: Sequence[str]) -> Pusher:
        options = client_options(self.settings, urls[0], timeout_s=PUSH_TIMEOUT_S)
        return Pusher(
            await clients.enter_async_context(httpx.AsyncClient(**options)),
            interval_s=self.settings.push_interval_s,
            capacity=self.settings.push_queue_samples,
            timeout_s=PUSH_TIMEOUT_S,
            on_push=self.metrics.count_push,
            on_drop=self.metrics.count_dropped,
            urls=urls,
        )

    async def _scrape_all(self, scraper: Scraper, tasks: Background) -> None:
        """Until the end; from the beginning of a scrape to that of the next it is `scrape_interval_s`."""
        while not tasks.exit.is_set():
            started_s = time.monotonic()
            await self._scrape_once(scraper)
            rest_s = started_s + self.scrape_interval_s - time.monotonic()
            # A time-out may be longer than the longest interval: even then the server gets a rest.
            await wait_for_exit(tasks.exit, max(rest_s, self.scrape_interval_s * MIN_REST))

    async def _scrape_once(self, scraper: Scraper) -> None:
        try:
            result = self.scrape = await scraper.scrape()
            self.metrics.count_scrape(result)
            self._set_interval(result.duration_s)
            if self.rings is not None:
                result = overlay(result, self.rings.read(t_s=result.t_s, monotonic_s=time.monotonic()))
            sample = self.observer.observe(result, interval_s=self.scrape_interval_s, phase=self._trainer_phase(result))
            is_exact = self.gate is not None and self.gate.is_exact
            self.pacer.advance(sample.pressure_frac, is_exact=is_exact, now_s=result.monotonic_s)
            gate = self.gate_status()
            if gate is not None:
                sample = self.observer.note_gate(self.pace(), gate)
            if self._pusher is not None:
                self._pusher.offer(sample)
        except Exception as exc:  # noqa: BLE001 - counted, and told
            self.metrics.count_internal_failure()
            self._repeats.error("scrape failed in the sidecar itself", exc)

    def _set_interval(self, duration_s: float) -> None:
        usual_s, was_s = self.settings.scrape_interval_s, self.scrape_interval_s
        longest_s = self.settings.scrape_longest_s
        self.scrape_interval_s = next_interval_s(was_s, duration_s, usual_s=usual_s, longest_s=longest_s)
        self.metrics.set_scrape_interval(self.scrape_interval_s)
        if (was_s == usual_s) != (self.scrape_interval_s == usual_s):
            logger.info(
                "scrape interval_s=%.2f duration_s=%.3f usual_s=%g", self.scrape_interval_s, duration_s, usual_s
            )

    def _trainer_phase(self, result: ScrapeResult) -> Phase | None:
        """What the trainers did since the last good page: the interval that the page tells about."""
        if self.trainers is None:
            return None
        self.trainers.poll(time.monotonic_ns())
        return self.trainers.take() if result.snapshot is not None else None


def create_app(settings: SidecarSettings) -> FastAPI:
    """The application; ``app.state.sidecar`` is its `Sidecar`."""
    sidecar = Sidecar(settings)
    app = build_app(
        settings,
        lifespan=sidecar.run,
        registry=sidecar.metrics.registry,
        readiness=lambda: None,
        description=DESCRIPTION,
    )
    app.state.sidecar = sidecar
    _add_reading_routes(app, sidecar)
    _add_pace_routes(app, sidecar)
    return app


def _add_reading_routes(app: FastAPI, sidecar: Sidecar) -> None:
    observer = sidecar.observer

    @app.get("/v1/load", tags=["server"], summary="Newest observation, engine state, and the signals it is made of")
    async def load(
        window_s: Annotated[float, Query(ge=0, le=3600, description="Seconds of samples to add", examples=[60])] = 0.0,
    ) -> Load:
        now_s = time.monotonic()
        snapshot = observer.snapshot
        return Load(
            sample=observer.sample,
            age_s=now_s - observer.sample_monotonic_s if observer.sample else None,
            state=observer.status.state,
            since_s=observer.status.since_s,
            signals=dict(snapshot.signals) if snapshot else {},
            missing_signals=observer.missing,
            scrape=sidecar.scrape_status(),
            kv_capacity_tokens=snapshot.kv_capacity_tokens if snapshot else None,
            source="plugin" if snapshot is not None and snapshot.exact else "scrape",
            max_num_seqs=sidecar.rings.max_num_seqs if sidecar.rings is not None else None,
            gate=sidecar.gate_status(),
            trainer=sidecar.trainer_status(),
            window=observer.window(since_monotonic_s=now_s - window_s) if window_s > 0 else (),
        )

    @app.get("/v1/forecast", tags=["server"], summary="Arrivals and requests in the engine, with quantiles")
    async def forecast(
        horizon_s: Annotated[
            float | None,
            Query(gt=0, le=MAX_HORIZON_S, description="Seconds ahead; all usual horizons if left out", examples=[5]),
        ] = None,
    ) -> Forecast:
        return Forecast(
            t_s=observer.sample.t_s if observer.sample else time.time(),
            method=observer.method,
            season_s=observer.season_s,
            num_observations=observer.num_observations,
            points=observer.predict(HORIZONS_S if horizon_s is None else (horizon_s,)),
        )

    @app.get("/v1/calibration", tags=["server"], summary="P(violation) by load and phase, and the cost of a sync ahead")
    async def calibration(
        sync_duration_s: Annotated[
            float, Query(gt=0, le=600, description="How long the sync would take", examples=[5])
        ] = DEFAULT_SYNC_DURATION_S,
    ) -> Calibration:
        return observer.calibration(sync_duration_s=sync_duration_s)

    @app.get("/v1/slo", tags=["server"], summary="Goodput, attainment and error budget, by sliding window")
    async def slo() -> SloReport:
        return observer.slo_report(now_s=time.monotonic())


def _add_pace_routes(app: FastAPI, sidecar: Sidecar) -> None:
    @app.get("/v1/pace", tags=["trainer"], summary="How much the trainer beside this server may run")
    async def read_pace() -> Pace:
        return sidecar.pace()

    @app.put("/v1/pace", tags=["trainer"], summary="Follow the load (auto), stop the trainer (pause), free it (run)")
    async def set_pace(request: PaceRequest) -> Pace:
        sidecar.order_pace(request.mode)
        return sidecar.pace()
