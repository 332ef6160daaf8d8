"""When a worker that has not ended is taken for dead (pure).

A worker's death is seen at once, by the end of its pipe. What is left: it is silent for the one timeout T (stopped, or
all of it hangs), or says that its inner loop has got nowhere for max(2 T, 10 steps) though it waits for nothing.
A silent one that still computes keeps Python's lock, and may be about to give it back: it has another T. So all ends
within 3 T, unless ten steps take longer. Slow, yielding and paused workers say that they are, and live.

Until a worker has said anything it imports and builds its model, for which it has `START_S`.

The time for which the agent itself stood still counts for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol import AliveEvent

SILENT_AND_BUSY = 2.0
START_S = 300.0
"""On a busy host a start that only gets what is left takes minutes."""
STILL = 2.0
STILL_STEPS = 10.0
TICKS_PER_TIMEOUT = 10.0
LATE_TICKS = 2.0
"""A tick that comes so many periods late was not slept through: the agent stood still."""


@dataclass(slots=True)
class Pulse:
    """What is known of one worker."""

    heard_s: float
    has_spoken: bool = False
    last: AliveEvent | None = None
    cpu_s: float = 0.0
    """Processor time that it had used when it was last heard, or at the last tick at which it had used more."""
    computed_s: float = 0.0
    """When that was."""


class Watchdog:
    """Of the workers of one start, by rank."""

    def __init__(self, num_ranks: int, *, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._pulses = [Pulse(heard_s=now_s) for _ in range(num_ranks)]
        self._ticked_s = now_s

    @property
    def num_ranks(self) -> int:
        return len(self._pulses)

    @property
    def period_s(self) -> float:
        """Time between two ticks."""
        return self._timeout_s / TICKS_PER_TIMEOUT

    def hear(self, rank: int, event: AliveEvent | None, *, now_s: float) -> None:
        """The worker said something; None: something else than that it lives."""
        pulse = self._pulses[rank]
        pulse.heard_s, pulse.has_spoken = now_s, True
        if event is not None:
            pulse.last = event

    def heard_s(self, rank: int) -> float:
        """Time of its last sign of life."""
        return self._pulses[rank].heard_s

    def tick(self, cpu_s: list[float | None], *, now_s: float) -> tuple[int, str] | None:
        """The rank to kill, and why; ``cpu_s`` is the processor time that each has used, None where nobody knows."""
        gap_s, self._ticked_s = now_s - self._ticked_s, now_s
        late_s = gap_s - self.period_s
        if late_s > LATE_TICKS * self.period_s:
            for pulse in self._pulses:
                pulse.heard_s = min(pulse.heard_s + late_s, now_s)
        for rank, pulse in enumerate(self._pulses):
            used_s = cpu_s[rank]
            if used_s is not None and used_s > pulse.cpu_s:
                pulse.cpu_s, pulse.computed_s = used_s, now_s
            reason = self._verdict(pulse, now_s)
            if reason is not None:
                return rank, reason
        return None

    def _verdict(self, pulse: Pulse, now_s: float) -> str | None:
        silent_s = now_s - pulse.heard_s
        if not pulse.has_spoken:
            return f"said nothing for {silent_s:.0f} s after its start" if silent_s >= START_S else None
        computes = now_s - pulse.computed_s < self._timeout_s / 2
        if silent_s >= self._timeout_s * (SILENT_AND_BUSY if computes else 1.0):
            return f"silent for {silent_s:.1f} s"
        last = pulse.last
        if last is None or last.waits:
            return None
        limit_s = max(STILL * self._timeout_s, STILL_STEPS * (last.step_time_s or 0.0))
        if last.still_s >= limit_s:
            return f"no progress for {last.still_s:.1f} s at step {last.step}"
        return None


def cpu_seconds(stat: str, *, ticks_per_s: float) -> float | None:
    """User and system time in a line of ``/proc/PID/stat``."""
    fields = stat.rpartition(")")[2].split()
    try:
        return (int(fields[11]) + int(fields[12])) / ticks_per_s
    except (IndexError, ValueError):
        return None
