"""The lab: whatever is tried and measured beside the run. Nothing in it can fail a tick.

`Experiments` takes turns between two policies, `ShadowBook` asks policies that are not in force, `HeadroomMonitor` says
what timing is worth here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from controller.clock import Clock
from controller.experiment_records import Experiment, status_of
from controller.experiments import Experiments
from controller.headroom import CostSource
from controller.headroom_monitor import WINDOW_S, HeadroomMonitor
from controller.lab_metrics import LabMetrics
from controller.lab_schema import ExperimentSpec, ExperimentStatus, Headroom, ShadowOrder, ShadowPage
from controller.paces import Paces
from controller.policy.base import FleetView, bound_names
from controller.schema import DecisionRecord, Mode
from controller.shadow_book import ShadowBook
from controller.state import FleetState
from controller.view import build_view
from service.repeats import Repeats
from sidecar.schema import LoadSample

logger = logging.getLogger(__name__)


class Lab:
    """Experiments, policies in shadow and headroom of one controller."""

    def __init__(
        self,
        state: FleetState,
        metrics: LabMetrics,
        clock: Clock,
        *,
        costs: CostSource,
        remember: Callable[[DecisionRecord], None],
    ) -> None:
        """``remember`` is told of every decision in shadow that is journalled."""
        now_s = clock()
        self._state = state
        self._clock = clock
        self._metrics = metrics
        self._repeats = Repeats(logger)
        self._paces = Paces()
        self.experiments = Experiments(state, now_s=now_s)
        self.shadows = ShadowBook(state, self._metrics, now_s=now_s, remember=remember)
        self.headroom = HeadroomMonitor(state, self.shadows, costs, now_s=now_s)

    def before_decision(self, now_s: float) -> None:
        """An experiment may switch the policy, or hand out the budget of a block."""
        with self._counted("experiment"):
            self.experiments.on_tick(now_s)
        self.headroom.follow(now_s)

    @property
    def looks_at_costs(self) -> bool:
        """Whether `after_decision` needs to know what a sync of the whole fleet costs."""
        return bool(self.shadows.shadows) and self._state.settings.mode is not Mode.PER_ISLAND

    def after_decision(self, view: FleetView, now_s: float) -> None:
        with self._counted("experiment"):
            self._paces.follow(self._state.registry.islands, paused=self._state.paused, now_s=now_s)
            if self.experiments.running is not None:
                self.experiments.follow(bound_names(view))
        with self._counted("shadow"):
            self.shadows.on_tick(view, now_s)

    def observe(self, samples: Iterable[LoadSample]) -> None:
        """Samples that were accepted, before they are committed."""
        with self._counted("experiment"):
            self.experiments.observe(samples)

    async def refresh(self) -> None:
        """Compute the headroom anew."""
        with self._counted("headroom"):
            await self.headroom.refresh(self._clock())

    async def report_headroom(self, window_s: int) -> Headroom:
        if window_s == WINDOW_S and self.headroom.latest is not None:
            return self.headroom.latest
        return await self.headroom.report(self._clock(), window_s=window_s)

    async def set_shadows(self, order: ShadowOrder) -> ShadowPage:
        self.shadows.set(order.policies, now_s=self._clock())
        logger.info("shadow set policies=%s", [spec.label for spec in order.policies])
        await self._state.journal.commit()
        return ShadowPage(policies=self.shadows.statuses())

    async def start_experiment(self, spec: ExperimentSpec) -> ExperimentStatus:
        now_s = self._clock()
        view = build_view(self._state, now_s)
        experiment = self.experiments.start(spec, view, now_s=now_s, pace_s=self._paces.slowest_s)
        await self._state.journal.commit()
        return await self._status(experiment)

    async def stop_experiment(self, number: int) -> ExperimentStatus | None:
        """The experiment as it ended; None when there is none of this number."""
        experiment = self.experiments.find(number)
        if experiment is None:
            return None
        self.experiments.stop(experiment, now_s=self._clock())
        await self._state.journal.commit()
        return await self._status(experiment)

    async def experiment(self, number: int) -> ExperimentStatus | None:
        experiment = self.experiments.find(number)
        return None if experiment is None else await self._status(experiment)

    async def all_experiments(self) -> tuple[ExperimentStatus, ...]:
        return tuple([await self._status(experiment) for experiment in self.experiments.all])

    async def _status(self, experiment: Experiment) -> ExperimentStatus:
        """In a thread, of what stands now."""
        record, order, blocks = experiment.record, experiment.order, tuple(experiment.blocks)
        return await asyncio.to_thread(status_of, record, order, blocks, now_s=self._clock())

    @property
    def running_block(self) -> int | None:
        running = self.experiments.running
        return running.current.index if running is not None and running.blocks else None

    @contextmanager
    def _counted(self, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - counted, and told
            self._metrics.failures.labels(part).inc()
            self._repeats.error(f"lab failed part={part}", exc)
