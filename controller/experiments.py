"""The switchback experiments of a run: one at a time, journalled block by block, gone on with after a restart.

Each block sets its policy, and a budget of none; when the washout is over it gets the budget of the block. Samples of
the servers that islands are bound to count for the block in which their interval lies, also those that come late: the
block before the running one stays open, the last one for `SETTLE_S` after its end. What a sample adds is queued for
the journal with the sample itself: where that keeps every sample, a kill loses or counts both.

After an absence (the controller was killed, or stood still) of up to `MAX_ABSENCE_FRAC` of what counts of a block, or
of a few ticks, the block goes on. After a longer one, or when its budget was lost, it begins again, and all later ones
shift.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable

from controller.experiment_records import (
    META_PREFIX,
    SEEN_EVERY_S,
    Experiment,
    ExperimentRecord,
    restore_experiments,
)
from controller.lab_schema import Block, Disturbance, ExperimentSpec, ExperimentState
from controller.policy.base import FleetView, bound_names
from controller.state import FleetState
from controller.switchback import (
    budget_of,
    check_experiment,
    check_time_for_syncs,
    washout_budget,
)
from service.errors import ConflictError, InputError
from sidecar.schema import LoadSample

logger = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Samples come a second or two late. What a relay sends later still is lost to the last block."""
RECENT_ROUNDS = 8
"""More cannot overlap the interval of a sample that is young enough to be accepted, unless they take no time."""


class Experiments:
    """All experiments in the journal; at most one runs."""

    def __init__(self, state: FleetState, *, now_s: float) -> None:
        self._state = state
        self._all = restore_experiments(state.reader.meta())
        self._bound: frozenset[str] = frozenset()
        self._sync_windows: tuple[tuple[float, float], ...] = ()
        if self.running is not None:
            self._resume(self.running, now_s)

    @property
    def running(self) -> Experiment | None:
        return next((experiment for experiment in self._all.values() if experiment.is_running), None)

    @property
    def all(self) -> list[Experiment]:
        return list(self._all.values())

    def find(self, number: int) -> Experiment | None:
        return self._all.get(number)

    def check_idle(self, field: str) -> None:
        """Raises `ConflictError` while an experiment owns policy and budget."""
        if self.running is not None and not self.running.record.put_back:
            raise _running_error(self.running, field)

    def start(self, spec: ExperimentSpec, view: FleetView, *, now_s: float, pace_s: float | None = None) -> Experiment:
        """Begin with the first block.

        Raises:
            ConflictError: another one runs, or the run is paused.
            InputError: it contradicts itself, or the present pace of the islands.
        """
        if self.running is not None:
            raise _running_error(self.running, "experiment")
        check_experiment(spec, self._state.settings.policy_context)
        check_time_for_syncs(spec, view, now_s, pace_s=pace_s)
        if self._state.paused:
            raise ConflictError("the run is paused", field="experiment", remedy="resume the run first")
        record = ExperimentRecord(
            id=max(self._all, default=0) + 1,
            spec=spec,
            state=ExperimentState.RUNNING,
            started_s=now_s,
            before_policy=self._state.policy_spec,
            before_budget=self._state.budget,
        )
        experiment = self._all[record.id] = Experiment(record)
        self._keep(experiment)
        self._bound = bound_names(view)
        self._begin_block(experiment, 0, now_s=now_s)
        logger.info("experiment started id=%d a=%s b=%s blocks=%d", record.id, spec.a.label, spec.b.label, spec.blocks)
        return experiment

    def stop(self, experiment: Experiment, *, now_s: float, detail: str = "") -> None:
        """End it now, and put policy and budget from before back; one that is over stays as it is."""
        if not experiment.is_running:
            return
        if experiment.blocks and now_s < experiment.current.ends_s:
            self._set_block(experiment, -1, ends_s=now_s, disturbance=Disturbance.STOPPED)
        self._put_back(experiment)
        self._end(experiment, ExperimentState.STOPPED, now_s=now_s, detail=detail)

    def on_tick(self, now_s: float) -> None:
        """Switch when a washout or a block is over, and note down how the running block goes."""
        experiment = self.running
        if experiment is None:
            return
        try:
            self._advance(experiment, now_s)
        except InputError as exc:  # The settings of a later start may leave no room for its policies.
            self.stop(experiment, now_s=now_s, detail=str(exc))
            return
        self._look(experiment, now_s)

    def _advance(self, experiment: Experiment, now_s: float) -> None:
        block = experiment.current
        # Unseen until its end, or seen in what is the future on a clock that was set back.
        unseen_s = max(min(now_s, block.ends_s) - block.seen_s, block.seen_s - now_s)
        if unseen_s > experiment.max_absence_s(self._state.settings.tick_s):
            self._begin_again(experiment, now_s)
        elif now_s >= block.ends_s and block.index + 1 < len(experiment.order):
            self._begin_block(experiment, block.index + 1, now_s=now_s)
        elif now_s >= block.ends_s:
            self._put_back(experiment)
            if now_s >= block.ends_s + SETTLE_S:
                self._end(experiment, ExperimentState.DONE, now_s=now_s)
        elif now_s >= block.counts_from_s and self._state.budget.spec != budget_of(experiment.record.spec):
            self._state.set_budget(budget_of(experiment.record.spec), now_s=now_s)

    def _begin_block(self, experiment: Experiment, index: int, *, now_s: float, attempt: int = 1) -> None:
        spec = experiment.record.spec
        self._state.set_policy(experiment.policy(index))
        self._state.set_budget(washout_budget(spec) if spec.washout_s > 0 else budget_of(spec), now_s=now_s)
        block = Block(
            index=index,
            arm=experiment.order[index],
            started_s=now_s,
            counts_from_s=now_s + spec.washout_s,
            ends_s=now_s + spec.block_s,
            seen_s=now_s,
            attempt=attempt,
        )
        experiment.blocks[index:] = [block]
        self._keep_block(experiment, block)
        logger.info(
            "experiment block id=%d block=%d arm=%s attempt=%d", experiment.record.id, index, block.arm, attempt
        )

    def _begin_again(self, experiment: Experiment, now_s: float) -> None:
        block = experiment.current
        logger.warning(
            "experiment block begins again id=%d block=%d away_s=%.1f",
            experiment.record.id,
            block.index,
            now_s - block.seen_s,
        )
        self._begin_block(experiment, block.index, now_s=now_s, attempt=block.attempt + 1)

    def _look(self, experiment: Experiment, now_s: float) -> None:
        entries = self._state.rounds.entries[-2 * (experiment.record.spec.syncs_per_block + RECENT_ROUNDS) :]
        self._sync_windows = tuple((e.began_s, e.closed_s or math.inf) for e in entries[-RECENT_ROUNDS:])
        for at, block in experiment.latest_blocks:
            syncs = sum(entry.spent and block.counts_from_s <= entry.began_s < block.ends_s for entry in entries)
            if syncs != block.syncs:
                self._set_block(experiment, at, syncs=syncs)
        block = experiment.current
        if self._state.paused and block.counts_from_s <= now_s < block.ends_s and block.disturbance is None:
            self._set_block(experiment, -1, disturbance=Disturbance.PAUSED)
        experiment.blocks[-1] = experiment.current.model_copy(update={"seen_s": now_s})
        if now_s - experiment.told_s >= SEEN_EVERY_S and experiment.is_running:
            experiment.told_s = now_s
            self._keep_block(experiment, experiment.current)

    def follow(self, bound: Collection[str]) -> None:
        """Servers that islands are bound to now. Those of islands that died stay: their requests go on."""
        self._bound |= frozenset(bound)

    def observe(self, samples: Iterable[LoadSample]) -> None:
        """Count what samples say of the SLO; the interval of each must lie within one block."""
        experiment = self.running
        if experiment is not None:
            for sample in samples:
                if sample.server_id in self._bound:
                    self._count(experiment, sample)

    def _count(self, experiment: Experiment, sample: LoadSample) -> None:
        if sample.slo_requests is None or sample.slo_violations is None or sample.interval_s is None:
            return
        began_s = sample.t_s - sample.interval_s
        for at, block in experiment.latest_blocks:
            if block.counts_from_s <= began_s and sample.t_s <= block.ends_s:
                in_sync = float(self._is_in_sync(sample, began_s))
                self._set_block(
                    experiment,
                    at,
                    requests=block.requests + sample.slo_requests,
                    violations=block.violations + sample.slo_violations,
                    requests_in_sync=block.requests_in_sync + in_sync * sample.slo_requests,
                    violations_in_sync=block.violations_in_sync + in_sync * sample.slo_violations,
                )

    def _is_in_sync(self, sample: LoadSample, began_s: float) -> bool:
        """As the trainers beside the server tell; where there is no gate, as the rounds are known."""
        if sample.trainer_phase is not None:
            return sample.trainer_phase == "sync"
        return any(start_s < sample.t_s and end_s > began_s for start_s, end_s in self._sync_windows)

    def _resume(self, experiment: Experiment, now_s: float) -> None:
        """Go on after a restart of the controller, whose settings may be others by now."""
        state, spec = self._state, experiment.record.spec
        logger.info("experiment goes on id=%d block=%d", experiment.record.id, len(experiment.blocks) - 1)
        if experiment.record.put_back:
            return
        replaced: dict[str, object] = {}
        own = [experiment.policy(index) for index in range(len(experiment.order))]
        # What the settings name now may be one of its own two policies.
        if experiment.blocks and (state.policy_was_changed or state.policy_spec not in own):
            replaced["before_policy"] = state.policy_spec
        if experiment.blocks and state.budget.spec not in {washout_budget(spec), budget_of(spec)}:
            replaced["before_budget"] = state.budget
        experiment.record = experiment.record.model_copy(update=replaced)
        self._keep(experiment)
        try:
            check_experiment(spec, state.settings.policy_context)
            if not experiment.blocks:
                self._begin_block(experiment, 0, now_s=now_s)
            elif replaced:
                self._begin_again(experiment, now_s)
        except InputError as exc:
            self.stop(experiment, now_s=now_s, detail=str(exc))

    def _put_back(self, experiment: Experiment) -> None:
        record = experiment.record
        if record.put_back:
            return
        try:
            self._state.set_policy(record.before_policy)
        except InputError as exc:
            logger.warning("the policy from before does not fit any more, using that of the settings: %s", exc)
            self._state.set_policy(self._state.settings.policy_spec)
        self._state.resume_budget(record.before_budget)
        experiment.record = record.model_copy(update={"put_back": True})
        self._keep(experiment)

    def _end(self, experiment: Experiment, state: ExperimentState, *, now_s: float, detail: str = "") -> None:
        experiment.record = experiment.record.model_copy(update={"state": state, "ended_s": now_s, "detail": detail})
        self._keep(experiment)
        logger.info("experiment ended id=%d state=%s %s", experiment.record.id, state, detail)

    def _set_block(self, experiment: Experiment, at: int, **changes: object) -> None:
        experiment.blocks[at] = experiment.blocks[at].model_copy(update=changes)
        self._keep_block(experiment, experiment.blocks[at])

    def _keep(self, experiment: Experiment) -> None:
        self._state.journal.put("meta", f"{META_PREFIX}{experiment.record.id}", experiment.record)

    def _keep_block(self, experiment: Experiment, block: Block) -> None:
        self._state.journal.put("meta", f"{META_PREFIX}{experiment.record.id}:{block.index}", block)


def _running_error(experiment: Experiment, field: str) -> ConflictError:
    number = experiment.record.id
    remedy = f"wait for its end, or stop it: DELETE /v1/experiments/{number}"
    return ConflictError(f"experiment {number} is running", field=field, remedy=remedy)
