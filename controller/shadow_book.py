"""The policies in shadow: asked after the one in force has decided, journalled, never enforced.

In per_island mode each is asked about each island, as the one in force is (`controller.shadow_islands`).

Journalled are every sync, and a change of reason when `JOURNAL_EVERY_S` have passed since the shadow's last record: at
most six a minute and its syncs, however often it is asked. One that raises, says what is not finite or takes longer
than `SLOW_S` of processor time is counted and not asked for `REST_S`. Its past starts anew with the controller.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from controller.lab_metrics import LabMetrics
from controller.lab_schema import ShadowStatus
from controller.orders import journal_decision
from controller.policy.base import FleetView, Policy, ask
from controller.policy_words import check_shadows
from controller.schema import Action, DecisionRecord, Mode, PolicySpec, Reason
from controller.shadow import Odometer, VirtualRun, follow_budget, odometers, shadow_view, with_sync
from controller.shadow_islands import Asked, Places, ask_islands
from controller.shadow_rounds import IslandsRun
from controller.state import FleetState
from service.errors import InputError

logger = logging.getLogger(__name__)

JOURNAL_EVERY_S = 10.0
REST_S = 60.0
SLOW_S = 0.05
"""A tick has 50 ms."""
KEPT_SYNCS = 1000
"""Of each island, where it is asked about each."""
MAX_KEPT_STARTS = 50_000
META_KEY = "shadow"

_KEPT = TypeAdapter(tuple[tuple[PolicySpec, ...], tuple[PolicySpec, ...]])
"""As the settings had them at the last start, and as they were set last."""


@dataclass(frozen=True, slots=True)
class Start:
    """A sync that a shadow would have started: of one island, or (slot None) of all."""

    t_s: float
    slot: int | None = None


@dataclass(slots=True, kw_only=True)
class Shadow:
    """One policy in shadow and what became of it."""

    spec: PolicySpec
    policy: Policy
    since_s: float
    run: VirtualRun
    starts: deque[Start] = field(default_factory=lambda: deque(maxlen=KEPT_SYNCS))
    island_syncs: int = 0
    last: tuple[Action, Reason] | None = None
    journalled: tuple[Action, Reason] | None = None
    journalled_s: float = -math.inf
    failures: int = 0
    resting_until_s: float | None = None

    def starts_since(self, since_s: float) -> list[tuple[int, float]]:
        """Slot and time of what single islands started lately."""
        recent = itertools.takewhile(lambda start: start.t_s >= since_s, reversed(self.starts))
        return [(start.slot, start.t_s) for start in recent if start.slot is not None]

    def status(self) -> ShadowStatus:
        action, reason = self.last or (None, None)
        return ShadowStatus(
            policy=self.spec.label,
            spec=self.spec,
            since_s=self.since_s,
            syncs=self.run.num_syncs,
            island_syncs=self.island_syncs if isinstance(self.run, IslandsRun) else None,
            last_sync_s=self.starts[-1].t_s if self.starts else None,
            budget_remaining=self.run.budget.remaining,
            action=action,
            reason=reason,
            failures=self.failures,
            resting_until_s=self.resting_until_s,
        )


class ShadowBook:
    """All policies in shadow."""

    def __init__(
        self, state: FleetState, metrics: LabMetrics, *, now_s: float, remember: Callable[[DecisionRecord], None]
    ) -> None:
        """``remember`` is told of every decision that is journalled."""
        self._state = state
        self._metrics = metrics
        self._remember = remember
        self._turn = 0
        self.shadows: list[Shadow] = []
        self._restore(now_s)

    def _restore(self, now_s: float) -> None:
        """As they were set last over HTTP, unless the settings changed since."""
        wanted = self._state.settings.shadow_specs
        current = wanted
        kept = self._state.reader.meta().get(META_KEY)
        if kept is not None:
            try:
                configured, set_last = _KEPT.validate_json(kept)
                current = set_last if configured == wanted else wanted
            except ValidationError as exc:
                logger.warning("the shadow policies of the journal are impossible: %s", exc.errors()[0]["msg"])
        try:
            self.set(current, now_s=now_s)
        except InputError as exc:
            logger.warning("shadow policies do not fit the settings any more, using theirs: %s", exc)
            self.set(wanted, now_s=now_s)

    def set(self, specs: Sequence[PolicySpec], *, now_s: float) -> None:
        """Run these from now on; one that ran already goes on with its past.

        Raises:
            InputError: no such policy, or twice the same.
        """
        made = check_shadows(specs, self._state.settings.policy_context)
        running = {shadow.spec.label: shadow for shadow in self.shadows}
        self.shadows = [
            running.get(spec.label) or self._begin(spec, policy, now_s)
            for spec, policy in zip(specs, made, strict=True)
        ]
        kept = (self._state.settings.shadow_specs, tuple(specs))
        self._state.journal.put("meta", META_KEY, _KEPT.dump_json(kept).decode())

    def _begin(self, spec: PolicySpec, policy: Policy, now_s: float) -> Shadow:
        settings = self._state.settings
        per_island = settings.mode is Mode.PER_ISLAND
        kind = IslandsRun if per_island else VirtualRun
        num_starts = min(MAX_KEPT_STARTS, KEPT_SYNCS * settings.num_slots) if per_island else KEPT_SYNCS
        run = kind(budget=self._state.budget, marks={}, first_round=self._state.version)
        return Shadow(spec=spec, policy=policy, since_s=now_s, run=run, starts=deque(maxlen=num_starts))

    def statuses(self) -> tuple[ShadowStatus, ...]:
        return tuple(shadow.status() for shadow in self.shadows)

    def on_tick(self, view: FleetView, now_s: float) -> None:
        """Ask each; nothing that they do reaches the caller."""
        if not self.shadows:
            return
        seen = odometers(self._state.registry.islands)
        places = Places(self._state, view, now_s)
        self._turn += 1
        for shadow in self.shadows:
            if shadow.resting_until_s is not None and now_s < shadow.resting_until_s:
                continue
            shadow.resting_until_s = None
            started_s = time.thread_time()
            try:
                self._ask(shadow, view, seen, places, now_s)
            except Exception:
                logger.exception("shadow policy failed, it rests policy=%s rest_s=%g", shadow.spec.label, REST_S)
                self._rest(shadow, now_s)
            else:
                took_s = time.thread_time() - started_s
                if took_s > SLOW_S:
                    logger.warning("shadow policy is slow, it rests policy=%s took_s=%.3f", shadow.spec.label, took_s)
                    self._rest(shadow, now_s)

    def _rest(self, shadow: Shadow, now_s: float) -> None:
        self._metrics.shadow_failures.labels(shadow.spec.label).inc()
        shadow.failures += 1
        shadow.resting_until_s = now_s + REST_S

    def _ask(self, shadow: Shadow, view: FleetView, seen: dict[int, Odometer], places: Places, now_s: float) -> None:
        run = follow_budget(shadow.run, self._state.budget)
        shadow.run = run
        if isinstance(run, IslandsRun):
            join_s = self._state.settings.sync_times.join_s
            shadow.run, asked = ask_islands(
                shadow.policy, run, view, seen, places, turn=self._turn, join_s=join_s, now_s=now_s
            )
        else:
            seen_by_it = shadow_view(view, run, seen, now_s)
            decision = ask(shadow.policy, seen_by_it, now_s)
            ready = tuple(island.slot for island in seen_by_it.islands if island.ready)
            asked = [Asked(slot=None, slots=ready, decision=decision, round=seen_by_it.round)]
            if decision.action is Action.SYNC:
                shadow.run = with_sync(run, seen, now_s=now_s, sync_s=view.expected_sync_s)
        for one in asked:
            self._metrics.shadow_decisions.labels(shadow.spec.label, one.decision.action, one.decision.reason).inc()
            self._journal(shadow, one, now_s)
        self._note(shadow, asked, now_s)

    def _note(self, shadow: Shadow, asked: Sequence[Asked], now_s: float) -> None:
        said = Counter((one.decision.action, one.decision.reason) for one in asked)
        came = [one for one in asked if one.decision.action is Action.SYNC]
        shadow.starts.extend(Start(now_s, one.slot) for one in came)
        shadow.island_syncs += sum(one.slot is not None for one in came)
        if came:
            shadow.last = (Action.SYNC, came[0].decision.reason)
        elif said:
            ((shadow.last, _),) = said.most_common(1)

    def _journal(self, shadow: Shadow, asked: Asked, now_s: float) -> None:
        decision = asked.decision
        said = (decision.action, decision.reason)
        changed = said != shadow.journalled and now_s - shadow.journalled_s >= JOURNAL_EVERY_S
        if decision.action is not Action.SYNC and not changed:
            return
        shadow.journalled, shadow.journalled_s = said, now_s
        record = journal_decision(
            self._state,
            decision,
            round_number=asked.round,
            slots=asked.slots,
            slot=asked.slot,
            now_s=now_s,
            shadow=shadow.spec.label,
        )
        self._remember(record)
