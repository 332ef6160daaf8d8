"""Which fragment a round syncs, when the parameters are cut into several. Pure.

With F fragments each round syncs one of them, in turn; when rounds come is the policy's. That is the staggered schedule
of Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512): the peak of the traffic falls to 1 / F. The number of
the round alone says whose turn it is: the schedule survives restarts and has no state.

Islands learn F with their lease. Each fragment has versions of its own; round R takes the fragment R mod F from its
version R div F to the next, so that "the run is at version V" means that rounds 0 to V - 1 have been.
"""

from __future__ import annotations


def fragments_due(round_number: int, num_fragments: int) -> tuple[int, ...]:
    """Fragments that the round with that number syncs."""
    return (round_number % num_fragments,)
