"""The tick: expire leases, close rounds, let the policy decide, journal the decision, send directives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from controller.core import Controller
from controller.heap import Collections
from controller.islands_mode import IslandsMode
from controller.orders import islands_of, journal_decision, open_round, write_sync
from controller.policy.base import Binding, Decision, FleetView, Policy, ask, summarize
from controller.policy.guard import guard
from controller.policy.rule import common_terms, fall_back
from controller.schema import Action, DecisionRecord, DirectiveKind, Mode, Reason
from controller.stalls import Stalls
from controller.state import FleetState
from controller.view import build_view
from service.errors import ConflictError, UnavailableError
from service.repeats import Repeats

logger = logging.getLogger(__name__)

PRUNE_EVERY_S = 60.0
LONGEST_PAUSE_S = 0.1

# What an operator's own order cannot override; the rest (gap, min_h, the policy) it does.
MANUAL_OBSTACLES = {
    Reason.PAUSED: "resume the run first",
    Reason.NO_ISLANDS: "start an island",
    Reason.ISLANDS_NOT_READY: "wait until all islands report progress",
    Reason.SYNC_IN_FLIGHT: "wait until the open round closes",
    Reason.BUDGET_EXHAUSTED: "set a new budget",
}


class Loop:
    """Owns the decisions of a controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._metrics = controller.metrics
        self._stalls = Stalls()
        self._repeats = Repeats(logger)
        self._pruned_s = 0.0
        self._islands: tuple[FleetState, IslandsMode] | None = None
        self._unbound: tuple[int, ...] = ()
        self._collections = Collections()

    @property
    def _state(self) -> FleetState:
        return self._controller.state

    @property
    def _islands_mode(self) -> IslandsMode | None:
        """That of the state that is led now; None in synchronous mode."""
        state = self._state
        if state.settings.mode is not Mode.PER_ISLAND:
            return None
        if self._islands is None or self._islands[0] is not state:
            mode = IslandsMode(
                state,
                self._metrics,
                decide=lambda view, now_s: self._decide(state.policy, view, now_s),
                remember=self._controller.recent.decisions.add,
            )
            self._islands = state, mode
        return self._islands[1]

    async def tick(self) -> None:
        """One tick, if this controller leads; a failure is counted and the next one tries again."""
        if self._controller.leadership.leads:
            await self._tick()
        self._collections.collect_if_due()  # also of a standby, which answers everybody that it is none

    async def _tick(self) -> None:
        await self.note_running()
        started_s = time.perf_counter()
        try:
            with self._controller.right_of_way.taken():
                await self._on_tick(self._controller.clock())
        except UnavailableError:
            pass  # The journal counts and logs it, and readiness names it.
        except Exception as exc:  # noqa: BLE001 - counted, and told
            self._metrics.tick_failures.inc()
            self._repeats.error("tick failed", exc)
        self._metrics.tick_seconds.observe(time.perf_counter() - started_s)

    async def _on_tick(self, now_s: float) -> None:
        for agent in self._state.registry.expire(now_s):
            self._metrics.leases_lost.inc()
            logger.warning(
                "lease lost agent=%s slot=%s epoch=%d", agent.agent_id, agent.slot, self._state.registry.epoch
            )
        self._controller.note_recoveries(now_s)
        self._controller.desk.on_tick(now_s)
        self._controller.close_rounds(now_s)
        self._controller.lab.before_decision(now_s)
        islands = self._islands_mode
        view = build_view(self._state, now_s, with_costs=islands is None or self._controller.lab.looks_at_costs)
        if islands is not None:
            islands.on_tick(view, now_s)
        else:
            self._enact(self._decide(self._state.policy, view, now_s), view, now_s)
        self._controller.lab.after_decision(view, now_s)
        if now_s - self._pruned_s >= PRUNE_EVERY_S:
            self._pruned_s = now_s
            self._warn_unbound(view)
            self._state.forget(now_s)
            self._state.journal.prune(self._state.settings.kept_since_s(now_s))
        await self._publish_soon()

    async def note_running(self) -> None:
        """Every ``watch_every_s``, also while a tick waits: time in which this process stood still is held against
        nobody.

        Also by the tick itself: after a stall either may come first.
        """
        if not self._controller.has_state:
            self._stalls.note(due_s=0.0, least_s=0.0)  # a standby runs, too
            return
        settings = self._state.settings
        stood_s = self._stalls.note(due_s=settings.watch_every_s, least_s=settings.takeover_after_s)
        if stood_s and self._controller.leadership.leads:
            logger.warning("stood still, leases are longer for it stood_s=%.1f", stood_s)
            self._state.registry.excuse(stood_s, now_s=self._controller.clock())

    async def follow_costs(self) -> None:
        """Learn what syncs cost beside the islands that the next tick asks, a few at a time until it comes."""
        if not self._controller.leadership.leads:
            return
        try:
            if (mode := self._islands_mode) is not None:
                await self._follow_costs(mode, period_s=self._state.settings.tick_s)
        except Exception as exc:  # noqa: BLE001 - counted, and told
            self._metrics.tick_failures.inc()
            self._repeats.error("costs cannot be followed", exc)

    async def _follow_costs(self, mode: IslandsMode, *, period_s: float) -> None:
        parts = mode.next_asked()
        for part in parts:
            await self._controller.right_of_way.give()
            mode.follow_costs(part, self._controller.clock())
            await asyncio.sleep(min(0.8 * period_s / len(parts), LONGEST_PAUSE_S))

    async def refresh_headroom(self) -> None:
        """Compute anew what timing is worth, if this controller leads."""
        if self._controller.leadership.leads:
            await self._controller.lab.refresh()

    def _warn_unbound(self, view: FleetView) -> None:
        """Say which islands no sidecar stands beside, when that has changed: they hold up every policy that looks."""
        binding = Binding(view.servers)
        unbound = tuple(island.slot for island in view.islands if not binding.of(island.node, island.server_id))
        if unbound and unbound != self._unbound:
            logger.warning("no sidecar tells of the servers of these islands, so they count as full slots=%s", unbound)
        self._unbound = unbound

    def _decide(self, policy: Policy, view: FleetView, now_s: float) -> Decision:
        try:
            return ask(policy, view, now_s)
        except Exception as exc:  # noqa: BLE001 - counted, and told
            self._metrics.policy_failures.inc()
            self._repeats.error(f"policy failed policy={policy.name}", exc)
            return fall_back(view, now_s)

    def _enact(self, decision: Decision, view: FleetView, now_s: float) -> None:
        """Journal a decision and, when it says so, open the round and write the directives."""
        slots = tuple(island.slot for island in view.islands if island.ready)
        record = journal_decision(self._state, decision, round_number=view.round, slots=slots, now_s=now_s)
        self._controller.recent.decisions.add(record)
        self._metrics.decisions.labels(record.policy, record.action, record.reason).inc()
        if record.action is Action.SYNC:
            self._direct(record, syncing={island.slot for island in view.islands if island.syncing})

    def _direct(self, record: DecisionRecord, *, syncing: Collection[int]) -> None:
        """Open the round for all its slots; those that are in it already need no directive."""
        entry = open_round(self._state, record, slots=record.slots)
        islands = islands_of(self._state, set(record.slots) - set(syncing))
        write_sync(self._state, islands, entry, reason=record.reason, now_s=record.t_s)

    async def publish(self) -> None:
        """Hand out the directives once they are on disk; a disk that fails must not stop the training."""
        state = self._state
        seq = state.mailboxes.seq
        try:
            await state.journal.commit()
        except UnavailableError:
            await self._announce_unwritten(state, seq)
            raise
        state.mailboxes.announce(seq)

    async def _publish_soon(self) -> None:
        """As `publish`, but without waiting for a disk that is known to fail: the journal retries by itself."""
        if self._state.journal.failure is None:
            await self.publish()
        else:
            await self._announce_unwritten(self._state, self._state.mailboxes.seq)

    async def _announce_unwritten(self, state: FleetState, seq: int) -> None:
        """What no disk has is an order of the leader alone.

        Raises:
            StandbyError: another controller may lead.
        """
        await self._controller.leadership.confirm()
        state.mailboxes.announce(seq)

    def sync_now(self, *, dry_run: bool) -> str:
        """An operator's order to sync; refused for what no order can override."""
        self._controller.lab.experiments.check_idle("action")
        now_s = self._controller.clock()
        view = build_view(self._state, now_s)
        num_called = None
        if (islands := self._islands_mode) is not None and not view.paused:
            num_called = islands.call_all(view, now_s, dry_run=dry_run)
        if num_called is not None:
            return f"the other {num_called} islands are told to come to the open round"
        group = summarize(view, now_s)
        verdict = guard(view, group, now_s)
        if verdict is not None and verdict[1] in MANUAL_OBSTACLES:
            raise ConflictError(f"cannot sync: {verdict[1]}", field="action", remedy=MANUAL_OBSTACLES[verdict[1]])
        if not dry_run:
            terms = common_terms(view, group, now_s)
            self._enact(Decision(action=Action.SYNC, reason=Reason.MANUAL, terms=terms), view, now_s)
        return f"round {view.round} directed to {len(view.islands)} islands"

    def set_paused(self, paused: bool, *, dry_run: bool) -> str:
        """Hold or continue the whole run."""
        state = self._state
        if not dry_run:
            state.set_paused(paused)
            kind = DirectiveKind.PAUSE if paused else DirectiveKind.RESUME
            names = [island.agent_id for island in state.registry.islands]
            state.mailboxes.write_all(names, kind, epoch=state.registry.epoch, t_s=self._controller.clock())
        return "training pauses, no syncs" if paused else "training and syncs go on"
