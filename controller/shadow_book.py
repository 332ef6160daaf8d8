"""The policies in shadow: asked after the one in force has decided, journalled, never enforced.

Journalled are every sync, and a change of reason when `JOURNAL_EVERY_S` have passed since the shadow's last record: at
most six a minute and its syncs, however often it is asked. One that raises, says what is not finite or takes longer
than `SLOW_S` of processor time is counted and not asked for `REST_S`. Its past starts anew with the controller.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from controller.lab_metrics import LabMetrics
from controller.lab_schema import ShadowStatus
from controller.orders import journal_decision
from controller.policy.base import Decision, FleetView, Policy, ask
from controller.policy_words import check_shadows
from controller.schema import Action, DecisionRecord, PolicySpec, Reason
from controller.shadow import Odometer, VirtualRun, follow_budget, odometers, shadow_view, with_sync
from controller.state import FleetState
from service.errors import InputError

logger = logging.getLogger(__name__)

JOURNAL_EVERY_S = 10.0
REST_S = 60.0
SLOW_S = 0.05
"""A tick has 50 ms."""
KEPT_SYNCS = 1000
META_KEY = "shadow"

_KEPT = TypeAdapter(tuple[tuple[PolicySpec, ...], tuple[PolicySpec, ...]])
"""As the settings had them at the last start, and as they were set last."""


@dataclass(slots=True, kw_only=True)
class Shadow:
    """One policy in shadow and what became of it."""

    spec: PolicySpec
    policy: Policy
    since_s: float
    run: VirtualRun
    starts_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SYNCS))
    last: tuple[Action, Reason] | None = None
    journalled: tuple[Action, Reason] | None = None
    journalled_s: float = -math.inf
    failures: int = 0
    resting_until_s: float | None = None

    def status(self) -> ShadowStatus:
        action, reason = self.last or (None, None)
        return ShadowStatus(
            policy=self.spec.label,
            spec=self.spec,
            since_s=self.since_s,
            syncs=self.run.num_syncs,
            last_sync_s=self.starts_s[-1] if self.starts_s else None,
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
        run = VirtualRun(budget=self._state.budget, marks={}, first_round=self._state.version)
        return Shadow(spec=spec, policy=policy, since_s=now_s, run=run)

    def statuses(self) -> tuple[ShadowStatus, ...]:
        return tuple(shadow.status() for shadow in self.shadows)

    def on_tick(self, view: FleetView, now_s: float) -> None:
        """Ask each; nothing that they do reaches the caller."""
        if not self.shadows:
            return
        seen = odometers(self._state.registry.islands)
        for shadow in self.shadows:
            if shadow.resting_until_s is not None and now_s < shadow.resting_until_s:
                continue
            shadow.resting_until_s = None
            started_s = time.thread_time()
            try:
                self._ask(shadow, view, seen, now_s)
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

    def _ask(self, shadow: Shadow, view: FleetView, seen: dict[int, Odometer], now_s: float) -> None:
        shadow.run = follow_budget(shadow.run, self._state.budget)
        seen_by_it = shadow_view(view, shadow.run, seen, now_s)
        decision = ask(shadow.policy, seen_by_it, now_s)
        shadow.last = (decision.action, decision.reason)
        self._metrics.shadow_decisions.labels(shadow.spec.label, decision.action, decision.reason).inc()
        self._journal(shadow, decision, seen_by_it, now_s)
        if decision.action is Action.SYNC:
            shadow.run = with_sync(shadow.run, seen, now_s=now_s, sync_s=view.expected_sync_s)
            shadow.starts_s.append(now_s)

    def _journal(self, shadow: Shadow, decision: Decision, view: FleetView, now_s: float) -> None:
        said = (decision.action, decision.reason)
        changed = said != shadow.journalled and now_s - shadow.journalled_s >= JOURNAL_EVERY_S
        if decision.action is not Action.SYNC and not changed:
            return
        shadow.journalled, shadow.journalled_s = said, now_s
        record = journal_decision(
            self._state,
            decision,
            round_number=view.round,
            slots=tuple(island.slot for island in view.islands if island.ready),
            now_s=now_s,
            shadow=shadow.spec.label,
        )
        self._remember(record)
