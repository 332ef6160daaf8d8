"""Admission, weights and closing, as tables."""

from __future__ import annotations

import pytest

from diloco.synchronizer.rounds import (
    Attendance,
    Claim,
    Close,
    Refusal,
    Standing,
    close_reason,
    refusal,
    staleness_weight,
)


def refused(round_number: int, epoch: int = 5, *, max_staleness: int = 0, merged_version: int = 0) -> Refusal | None:
    claim = Claim(round=round_number, slot=0, epoch=epoch, tokens=1)
    standing = Standing(version=3, newest_epoch=5, max_staleness=max_staleness, merged_version=merged_version)
    return refusal(claim, standing)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(9, Refusal.MERGED), (10, None), (11, None)], ids=["less", "as much", "more"]
)
def test_less_progress_does_not_take_the_place_of_more_in_an_open_round(tokens: int, expected: Refusal | None) -> None:
    claim = Claim(round=3, slot=0, epoch=5, tokens=tokens)
    assert refusal(claim, Standing(version=3, newest_epoch=5, same_round_tokens=10)) is expected


@pytest.mark.parametrize(
    ("meant", "held", "expected"),
    [("a", "b", Refusal.OTHER_RUN), ("a", "a", None), (None, "b", None), ("a", None, None)],
    ids=["another", "this one", "not said", "not known"],
)
def test_a_claim_enters_only_the_run_that_it_is_for(
    meant: str | None, held: str | None, expected: Refusal | None
) -> None:
    claim = Claim(round=3, slot=0, epoch=5, tokens=1, run=meant)
    assert refusal(claim, Standing(version=3, newest_epoch=5, run=held)) is expected


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
    assert refused(round_number, epoch) is expected


@pytest.mark.parametrize(
    ("round_number", "expected"), [(3, None), (2, None), (1, None), (0, Refusal.LATE), (4, Refusal.EARLY)]
)
def test_a_claim_may_be_as_stale_as_it_is_allowed(round_number: int, expected: Refusal | None) -> None:
    assert refused(round_number, max_staleness=2) is expected


def test_a_stale_claim_is_fenced_like_any_other() -> None:
    assert refused(2, epoch=4, max_staleness=2) is Refusal.FENCED


@pytest.mark.parametrize(("round_number", "expected"), [(1, Refusal.MERGED), (2, None), (3, None)])
def test_progress_from_before_the_slots_last_merge_is_in_the_parameters_already(
    round_number: int, expected: Refusal | None
) -> None:
    assert refused(round_number, max_staleness=3, merged_version=2) is expected


def test_weights_fall_with_staleness_and_a_fresh_one_weighs_one() -> None:
    assert staleness_weight(0, exponent=0.5) == 1.0
    assert staleness_weight(3, exponent=0.5) == pytest.approx(0.5)
    assert staleness_weight(1, exponent=1.0) == pytest.approx(0.5)
    assert staleness_weight(9, exponent=0.0) == 1.0


@pytest.mark.parametrize(
    ("num_fresh", "awaits_others", "grace_until_s", "closes_at_s", "expected"),
    [
        (0, True, None, None, None),
        (1, True, None, 70.0, None),
        (1, False, None, 70.0, None),
        (1, True, None, 60.0, Close.TIMEOUT),
        (2, False, 65.0, 70.0, Close.QUORUM),
        (2, True, 65.0, 70.0, None),
        (2, True, 60.0, 70.0, Close.GRACE),
        (2, True, 65.0, 60.0, Close.TIMEOUT),
        (3, False, 65.0, 60.0, Close.QUORUM),
    ],
)
def test_a_round_closes_when_all_are_in_or_by_grace_or_timeout(
    num_fresh: int,
    awaits_others: bool,
    grace_until_s: float | None,
    closes_at_s: float | None,
    expected: Close | None,
) -> None:
    attendance = Attendance(
        num_fresh=num_fresh,
        quorum=2,
        awaits_others=awaits_others,
        grace_until_s=grace_until_s,
        closes_at_s=closes_at_s,
    )
    assert close_reason(attendance, 60.0) is expected
