"""What became of one fault, from what the watch saw."""

from __future__ import annotations

from dataclasses import dataclass

from replay.chaos.faults import FaultKind, Role
from replay.chaos.inject import Applied
from replay.chaos.measure import Blow, Sample, advances, furthest, longest_gap_s, steps_lost, trains_again_s
from replay.chaos.record import FaultRecord, Outcome
from replay.chaos.watch import Watch

AFTER_S = 1.0
"""Others may feel it a moment longer."""


@dataclass(slots=True)
class Course:
    """How a fault goes; asked at each look."""

    applied: Applied
    watch: Watch
    at_step: int | None
    detected_s: float | None = None
    answers_again_s: float | None = None
    trains_again_s: float | None = None
    _fell_silent: bool = False

    @property
    def slot(self) -> int | None:
        return self.applied.fault.slot

    @property
    def blow(self) -> Blow:
        applied = self.applied
        undone = applied.undone_s is not None and applied.fault.kind is not FaultKind.FREEZE
        over_s = applied.t_s if applied.undone_s is None else applied.undone_s
        return Blow(t_s=applied.t_s, over_s=over_s, pid=applied.pid, instance=applied.instance, undone=undone)

    def look(self) -> bool:
        """Take in what is new; whether the fault is over."""
        if self.detected_s is None and self._is_detected():
            self.detected_s = self.watch.now_s
        if self.slot is not None:
            self.trains_again_s = trains_again_s(self.watch.slots.get(self.slot, ()), self.blow)
            self._note_quick_recovery()
        else:
            self._look_at_service()
        return self.trains_again_s is not None and self.applied.failed_copy is None

    def _note_quick_recovery(self) -> None:
        """Who has trained again had been missed before, also where both came between two looks."""
        is_killed = self.applied.fault.kind is FaultKind.KILL
        if self.trains_again_s is not None and (is_killed or self.detected_s is not None):
            noticed_s = self.trains_again_s if self.detected_s is None else self.detected_s
            self.detected_s = min(noticed_s, self.trains_again_s)

    def _look_at_service(self) -> None:
        """A controller or synchronizer is over it when it answers again and then every slot has gone on."""
        seen = self.watch.seen[self.applied.member.name]
        self._fell_silent = self._fell_silent or not seen.answers
        if self.answers_again_s is None:
            since_s = self.applied.t_s if self.applied.undone_s is None else self.applied.undone_s
            is_new = self.applied.pid is None or self.applied.member.pid != self.applied.pid or self.blow.undone
            if seen.answers and seen.answered_s > since_s and is_new:
                self.answers_again_s = seen.answered_s
            return
        went_on = [next((t for t in advances(s) if t > self.answers_again_s), None) for s in self.watch.slots.values()]
        known = [t_s for t_s in went_on if t_s is not None]
        if len(known) == len(went_on):
            self.trains_again_s = max(known)

    def _is_detected(self) -> bool:
        applied = self.applied
        match applied.fault.role:
            case Role.WORKER:
                held = self.watch.holder_of(applied.fault.slot or 0)
                if held is None or applied.pid is None:
                    return False
                return held[0] is not applied.member or applied.pid not in held[1].worker_pids
            case Role.AGENT:
                return self._agent_is_missed()
            case _:
                return not self.watch.seen[applied.member.name].answers

    def _agent_is_missed(self) -> bool:
        """Whether the controller holds the agent for lost, or somebody else is in its place."""
        told = self.watch.controller
        if told is None or self.watch.controller_s <= self.applied.t_s:
            return False
        mine = [island for island in told.islands if island.agent_id == self.applied.member.name]
        samples = self.watch.slots.get(self.slot or 0, [])
        replaced = bool(samples) and samples[-1].instance != self.applied.instance and self.applied.instance is not None
        return replaced or any(not island.alive or island.slot != self.slot for island in mine)

    def record(self, outcome: Outcome, *, quiet_from_s: float) -> FaultRecord:
        """All that there is to say."""
        applied, until_s = self.applied, self.trains_again_s or self.watch.now_s
        concerned = [self.slot] if self.slot is not None else list(self.watch.slots)
        gap_s, normal_s = self._others(until_s + AFTER_S, quiet_from_s)
        return FaultRecord(
            kind=applied.fault.kind,
            target=applied.fault.target,
            outcome=outcome,
            slot=self.slot,
            pid=applied.pid,
            at_step=self.at_step,
            injected_s=applied.t_s,
            undone_s=applied.undone_s,
            detected_s=self.detected_s,
            answers_again_s=self.answers_again_s,
            trains_again_s=self.trains_again_s,
            detect_after_s=_since(applied.t_s, self.detected_s),
            recover_after_s=_since(applied.t_s, self.trains_again_s),
            steps_lost=sum(steps_lost(self.watch.slots.get(slot, []), self.blow) for slot in concerned)
            if self.slot is not None
            else 0,
            others_gap_s=gap_s,
            others_normal_gap_s=normal_s,
            detail=applied.detail,
        )

    def _others(self, until_s: float, quiet_from_s: float) -> tuple[float | None, float | None]:
        others = [samples for slot, samples in self.watch.slots.items() if slot != self.slot]
        if not others:
            return None, None
        since_s = self.applied.t_s
        until_s = min(until_s, self.watch.now_s)
        before_s = max(quiet_from_s, since_s - (until_s - since_s))
        gap_s = max(longest_gap_s(samples, since_s=since_s, until_s=until_s) for samples in others)
        if before_s >= since_s:
            return gap_s, None
        return gap_s, max(longest_gap_s(samples, since_s=before_s, until_s=since_s) for samples in others)


def begin(applied: Applied, watch: Watch) -> Course:
    slot = applied.fault.slot
    at_step = None if slot is None else furthest(watch.slots.get(slot, []), until_s=applied.t_s)
    return Course(applied, watch, at_step)


def _since(begin_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - begin_s


def is_trained(samples: list[Sample], *, least: int = 2) -> bool:
    """Whether a slot has taken so many steps."""
    return len(advances(samples)) > least
