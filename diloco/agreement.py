"""Where the settings of a synchronizer contradict the orders of whoever directs its rounds. Pure: sentences out.

Nothing here can hold a round up: the lesser quorum and the earlier close always count. But rounds then end otherwise
than they were ordered, and whoever runs them should know why. The part before the colon names the disagreement.
"""

from __future__ import annotations

from collections.abc import Iterator

from diloco.protocol import SyncCommand
from diloco.schema import OuterState

TOLERANCE_S = 1.0
"""Clocks and transfers account for less."""


def disagreements(command: SyncCommand, state: OuterState, *, now_s: float) -> Iterator[str]:
    """One sentence for each; a sync that nobody ordered contradicts nothing."""
    if command.autonomous:
        return
    if command.quorum is not None and state.quorum < command.quorum:
        yield (
            f"quorum: the round was directed to {command.quorum} contributions, the synchronizer's rounds have enough"
            f" with {state.quorum}; start it with --quorum {command.quorum} or more"
        )
    if command.close_by_s is None or state.round_timeout_s is None:
        return
    left_s = command.close_by_s - now_s
    if state.round_timeout_s < left_s - TOLERANCE_S:
        yield (
            f"round_timeout_s: the round has {left_s:.0f} s left, the synchronizer closes it"
            f" {state.round_timeout_s:g} s after its first contribution; raise its --round-timeout-s, or lower the"
            " controller's --sync-timeout-s"
        )
