"""How fast islands really take inner steps: with what they wait at the gate, which the time of one step does not tell.

Over the last `WINDOW_S`, of each slot: seconds per inner step, from what its heartbeats said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from controller.records import AgentRecord

LOOK_EVERY_S = 5.0
WINDOW_S = 120.0
LEAST_S = 30.0
"""Of less, one wait or one sync would be all that is seen."""

Mark = tuple[float, int]
"""When it was told, and the step."""


class Paces:
    """Of the islands that train now."""

    def __init__(self) -> None:
        self._marks: dict[int, deque[Mark]] = {}
        self._looked_s: float | None = None

    def follow(self, islands: Iterable[AgentRecord], *, paused: bool, now_s: float) -> None:
        """Note down where they are; a pause of the run, a restart and another holder begin anew."""
        if paused:
            self._marks.clear()
        if paused or (self._looked_s is not None and 0 <= now_s - self._looked_s < LOOK_EVERY_S):
            return
        self._looked_s = now_s
        before, self._marks = self._marks, {}
        for island in islands:
            told = island.progress
            if island.slot is None or told is None or island.progress_told_s is None:
                continue
            marks = before.get(island.slot) or deque()
            if marks and told.step < marks[-1][1]:
                marks.clear()
            if not marks or island.progress_told_s > marks[-1][0]:
                marks.append((island.progress_told_s, told.step))
            while marks[-1][0] - marks[0][0] > WINDOW_S:
                marks.popleft()
            self._marks[island.slot] = marks

    @property
    def slowest_s(self) -> float | None:
        """Seconds per inner step of the slowest island; None while none was watched for `LEAST_S`."""
        found = [_pace(marks[0], marks[-1]) for marks in self._marks.values() if marks[-1][0] - marks[0][0] >= LEAST_S]
        return max(found, default=None)


def _pace(first: Mark, last: Mark) -> float:
    """One that takes no step at all is at least as slow as one that took one."""
    return (last[0] - first[0]) / max(1, last[1] - first[1])
