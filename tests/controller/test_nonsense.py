"""Reports that cannot be true are refused by field, and what was believed once locks nobody out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.nonsense import (
    FIRST_SHARE,
    LIMITS,
    ROUNDS_AT_ONCE,
    ROUNDS_PER_S,
    STEPS_AT_ONCE,
    STEPS_PER_S,
    Claim,
    Known,
    can_go_on,
    check_heartbeat,
)
from controller.schema import Heartbeat
from diloco.schema import Phase, Progress
from service.errors import InputError
from tests.controller.helpers import START_S, progress, report

NOW_S = START_S + 10


def claim(told: Progress | None, *, told_s: float | None = START_S) -> Claim | None:
    return None if told is None else Claim(progress=told, told_s=told_s)


def check(last: Progress | None = None, *, slot: Progress | None = None, version: int = 5, **fields: Any) -> None:
    known = Known(own=claim(last), slot=claim(slot), version=version)
    check_heartbeat(Heartbeat(instance="i", epoch=1, t_s=START_S, **fields), known, now_s=NOW_S)


def test_ordinary_reports_pass() -> None:
    check(progress(5), progress=progress(6, step=1001), syncs=[report(5)])
    check(progress=progress(0, step=0))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"progress": progress(step=10**12)}, "progress.step"),
        ({"progress": progress(step=10**13)}, "progress.step"),
        ({"progress": progress(tokens=10**18 + 1)}, "progress.tokens"),
        ({"progress": progress(tokens=1001 * 10**9 + 1)}, "progress.tokens"),
        ({"progress": progress(1001)}, "progress.inner_steps_since_sync"),
        ({"progress": progress(tokens_since_sync=10**5)}, "progress.tokens_since_sync"),
        ({"progress": progress(step_time_s=1e308)}, "progress.step_time_s"),
        ({"progress": progress(update_norm=1e308)}, "progress.update_norm"),
        ({"progress": progress(residual_norm=1e308)}, "progress.residual_norm"),
        ({"progress": progress(restarts=2**61)}, "progress.restarts"),
        ({"progress": progress(skipped_steps=10**9)}, "progress.skipped_steps"),
        ({"progress": progress(last_sync_at_s=START_S + 1e6)}, "progress.last_sync_at_s"),
        ({"progress": progress(loss=1e300)}, "progress.loss"),
        ({"progress": progress(loss_at_sync=-1e9)}, "progress.loss_at_sync"),
        ({"progress": progress(round=20_000)}, "progress.round"),
        ({"syncs": [report(5), report(10**10)]}, "syncs.1.round"),
        ({"syncs": [report(finished_s=START_S - 1)]}, "syncs.0.finished_s"),
        ({"syncs": [report(finished_s=START_S + 1e6)]}, "syncs.0.finished_s"),
        ({"syncs": [report(pushed_s=START_S + 1e6)]}, "syncs.0.pushed_s"),
        ({"syncs": [report(inner_steps=10**15)]}, "syncs.0.inner_steps"),
        ({"syncs": [report(tokens=10**12)]}, "syncs.0.tokens"),
        ({"syncs": [report(bytes_pushed=10**18 + 1)]}, "syncs.0.bytes_pushed"),
        ({"syncs": [report(update_norm=1e31)]}, "syncs.0.update_norm"),
        ({"syncs": [report(5, staleness=60)]}, "syncs.0.staleness"),
        ({"syncs": [report(5, blocked_s=1e9)]}, "syncs.0.blocked_s"),
    ],
)
def test_nonsense_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        check(**fields)
    assert caught.value.field == field


def test_steps_go_back_only_with_a_restart() -> None:
    with pytest.raises(InputError, match="without a restart"):
        check(progress(step=1000), progress=progress(step=999))
    check(progress(step=1000), progress=progress(step=900, restarts=1))
    with pytest.raises(InputError) as caught:
        check(progress(restarts=2), progress=progress(restarts=1))
    assert caught.value.field == "progress.restarts"


@pytest.mark.parametrize("of_slot", [False, True])
def test_steps_grow_no_faster_than_hardware_could(of_slot: bool) -> None:
    before = progress(step=1000)
    known: dict[str, Any] = {"slot": before} if of_slot else {"last": before}
    most = 1000 + STEPS_AT_ONCE + 10 * STEPS_PER_S
    check(**known, progress=progress(step=most))
    with pytest.raises(InputError) as caught:
        check(**known, progress=progress(step=most + 1))
    assert caught.value.field == "progress.step"


def test_a_process_is_not_held_to_the_word_of_another() -> None:
    check(slot=progress(step=10**9, restarts=100), progress=progress(0, step=0))


def test_an_island_is_not_further_ahead_of_the_run_than_others_could_go_since_it_spoke() -> None:
    for version in (0, 5):
        most = version + ROUNDS_AT_ONCE + 10 * ROUNDS_PER_S
        check(progress(), version=version, progress=progress(round=most))
        check(slot=progress(), version=version, progress=progress(round=most))
        with pytest.raises(InputError) as caught:
            check(progress(), version=version, progress=progress(round=most + 1))
        assert caught.value.field == "progress.round"


def test_an_island_that_nothing_is_known_about_is_no_further_ahead_than_the_others_can_be() -> None:
    for version in (0, 5):
        known = Known(version=version, version_told_s=NOW_S - 3)
        most = version + ROUNDS_AT_ONCE + 3 * ROUNDS_PER_S
        for round_, is_believed in ((most, True), (most + 1, False)):
            beat = Heartbeat(instance="i", epoch=1, t_s=START_S, progress=progress(round=round_))
            with nullcontext() if is_believed else pytest.raises(InputError, match="is far ahead of the run's"):
                check_heartbeat(beat, known, now_s=NOW_S)


def test_a_controller_that_knows_nothing_believes_the_first_round_of_a_long_run() -> None:
    check(version=0, progress=progress(round=50_000))
    check(progress(phase=Phase.STARTING), version=0, progress=progress(round=50_000))
    with pytest.raises(InputError):
        check(version=0, progress=progress(round=10**8))


counts = st.integers(0, 10**19)


@given(
    step=st.integers(0, 2 * LIMITS["step"] // FIRST_SHARE),
    tokens=counts,
    inner=counts,
    restarts=st.integers(0, 10**7),
    slot_step=st.one_of(st.none(), st.integers(0, LIMITS["step"])),
)
def test_whoever_goes_on_from_a_believed_report_is_believed(
    step: int, tokens: int, inner: int, restarts: int, slot_step: int | None
) -> None:
    slot = None if slot_step is None else progress(0, step=slot_step, tokens=0, tokens_since_sync=0)
    fields = {"inner_steps_since_sync": inner % (1 << 62), "tokens": tokens % (1 << 62), "tokens_since_sync": 0}
    first = progress(**{**fields, "step": step, "restarts": restarts})
    if slot is not None and not can_go_on(slot):
        slot = None
    try:
        check(slot=slot, progress=first)
    except InputError:
        return
    later = {"step": step + 1, "tokens": first.tokens + 10, "inner_steps_since_sync": first.inner_steps_since_sync + 1}
    check(first, slot=slot, progress=first.model_copy(update=later))
    if can_go_on(first):
        check(slot=first, progress=first.model_copy(update=later | {"restarts": 0}))
        check(slot=first, progress=progress(0, step=0))
