"""Which fragment a round syncs, when the parameters are cut into several. Pure.

With F fragments and each of them synced once in H inner steps, a round comes every H / F steps and syncs one fragment,
in turn: fragment f at the steps (f + 1) H / F, then H later, and so on. This is the staggered schedule of Streaming
DiLoCo (Douillard et al., 2025, arXiv 2501.18512): the peak of the traffic falls to 1 / F, and the sum stays. The number
of the round alone says whose turn it is: the schedule survives restarts and has no state.

What an island can sync it says when it registers; today that is the whole model at once, so F = 1 is what runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentSchedule:
    """Fragments by turns."""

    num_fragments: int

    def due(self, round_number: int) -> tuple[int, ...]:
        """Fragments that the round with that number syncs."""
        return (round_number % self.num_fragments,)

    def steps_between(self, h: int) -> int:
        """Inner steps between two rounds, for every fragment to be synced once in ``h`` (or a little less often)."""
        return math.ceil(h / self.num_fragments)
