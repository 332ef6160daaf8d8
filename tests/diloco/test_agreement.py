"""Which settings of a synchronizer contradict an order."""

from __future__ import annotations

import pytest

from diloco.agreement import disagreements
from diloco.protocol import SyncCommand
from diloco.schema import OuterState

NOW_S = 1000.0


def told(*, quorum: int | None = 2, close_in_s: float | None = 48.0, autonomous: bool = False) -> list[str]:
    command = SyncCommand(
        epoch=0,
        deadline_s=NOW_S + 60,
        quorum=quorum,
        close_by_s=None if close_in_s is None else NOW_S + close_in_s,
        autonomous=autonomous,
    )
    state = OuterState(
        initialized=True,
        quorum=2,
        outer_lr=0.7,
        outer_momentum=0.9,
        round_timeout_s=60.0,
        manifest=None,
        fragments=(),
    )
    return [sentence.partition(":")[0] for sentence in disagreements(command, state, now_s=NOW_S)]


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ({}, []),
        ({"quorum": None, "close_in_s": None}, []),
        ({"quorum": 1}, []),
        ({"quorum": 3}, ["quorum"]),
        ({"close_in_s": 60.5}, []),
        ({"close_in_s": 96.0}, ["round_timeout_s"]),
        ({"quorum": 3, "close_in_s": 96.0}, ["quorum", "round_timeout_s"]),
        ({"quorum": 3, "close_in_s": 240.0, "autonomous": True}, []),
    ],
)
def test_what_ends_rounds_otherwise_than_they_were_ordered_is_named(
    orders: dict[str, float], expected: list[str]
) -> None:
    assert told(**orders) == expected  # type: ignore[arg-type]
