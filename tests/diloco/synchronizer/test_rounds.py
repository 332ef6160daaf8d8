"""Admission and closing, as tables."""

from __future__ import annotations

import pytest

from diloco.synchronizer.rounds import Claim, Close, Refusal, close_reason, refusal


@pytest.mark.parametrize(
    ("round_number", "epoch", "expected"),
    [
        (3, 5, None),
        (3, 6, None),
        (3, 4, Refusal.FENCED),
        (2, 5, Refusal.LATE),
        (4, 5, Refusal.EARLY),
        (2, 4, Refusal.FENCED),
    ],
)
def test_a_claim_enters_only_the_open_round_and_only_from_the_newest_epoch(
    round_number: int, epoch: int, expected: Refusal | None
) -> None:
    claim = Claim(round=round_number, slot=0, epoch=epoch, tokens=1)
    assert refusal(claim, version=3, newest_epoch=5) is expected


@pytest.mark.parametrize(
    ("num_complete", "closes_at_s", "expected"),
    [
        (0, None, None),
        (1, 70.0, None),
        (1, 60.0, Close.TIMEOUT),
        (2, 70.0, Close.QUORUM),
        (2, 60.0, Close.QUORUM),
        (3, 70.0, Close.QUORUM),
    ],
)
def test_a_round_closes_by_quorum_or_timeout(
    num_complete: int, closes_at_s: float | None, expected: Close | None
) -> None:
    assert close_reason(num_complete=num_complete, quorum=2, closes_at_s=closes_at_s, now_s=60.0) is expected
