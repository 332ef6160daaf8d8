from __future__ import annotations

import pytest

from controller.schema import AgentLease, Autonomy, Directive, DirectiveKind
from diloco.agent.rules import (
    MAX_H_WITHOUT_LEASE,
    Solitude,
    autonomous_command,
    autonomous_sync_due,
    backoff_s,
    counts,
    deaths_in_a_row,
    limits_of,
    rank_cores,
    rank_threads,
    refused_fragments,
    sync_command,
    times_of,
)
from diloco.protocol import SyncCommand
from diloco.schema import Phase, Progress, SyncTimes

TIMES = SyncTimes(sync_timeout_s=30.0)


def lease(autonomy: Autonomy = Autonomy()) -> AgentLease:  # noqa: B008
    return AgentLease(
        agent_id="a",
        slot=0,
        epoch=3,
        run_id="r",
        min_h=8,
        max_h=32,
        heartbeat_interval_s=1.0,
        lease_timeout_s=5.0,
        synchronizer_url=None,
        directive_seq=0,
        autonomy=autonomy,
    )


def progress(h: int, *, phase: Phase = Phase.INNER) -> Progress:
    return Progress(step=h, inner_steps_since_sync=h, tokens=h, tokens_since_sync=h, phase=phase)


def directive(kind: DirectiveKind, *, seq: int = 1, epoch: int = 3, deadline_s: float | None = None) -> Directive:
    return Directive(seq=seq, kind=kind, epoch=epoch, t_s=0.0, round=2, deadline_s=deadline_s)


def solitude(silent_s: float = 5.1, *, syncs: int = 0, since_last_sync_s: float | None = None) -> Solitude:
    return Solitude(silent_s=silent_s, syncs=syncs, since_last_sync_s=since_last_sync_s)


@pytest.mark.parametrize(
    ("h", "silent_s", "phase", "in_flight", "due"),
    [
        (32, 5.1, Phase.INNER, False, True),
        (31, 5.1, Phase.INNER, False, False),
        (32, 5.0, Phase.INNER, False, False),
        (32, 5.1, Phase.SYNC, False, False),
        (32, 5.1, Phase.PAUSED, False, False),
        (32, 5.1, Phase.INNER, True, False),
    ],
)
def test_islands_sync_untold_only_at_max_h_and_without_a_controller(
    h: int, silent_s: float, phase: Phase, in_flight: bool, due: bool
) -> None:
    limits, told = limits_of(lease()), progress(h, phase=phase)
    assert autonomous_sync_due(limits, solitude(silent_s), progress=told, in_flight=in_flight, now_s=0.0) is due


@pytest.mark.parametrize(
    ("autonomy", "alone", "due"),
    [
        (Autonomy(allowed=False), solitude(), False),
        (Autonomy(max_syncs=2), solitude(syncs=1), True),
        (Autonomy(max_syncs=2), solitude(syncs=2), False),
        (Autonomy(max_syncs=0), solitude(), False),
        (Autonomy(until_s=101.0), solitude(), True),
        (Autonomy(until_s=100.0), solitude(), False),
        (Autonomy(min_gap_s=3.0), solitude(since_last_sync_s=2.9), False),
        (Autonomy(min_gap_s=3.0), solitude(since_last_sync_s=3.0), True),
        (Autonomy(min_gap_s=3.0), solitude(), True),
    ],
)
def test_alone_an_island_keeps_to_what_the_budget_left(autonomy: Autonomy, alone: Solitude, due: bool) -> None:
    limits = limits_of(lease(autonomy))
    assert autonomous_sync_due(limits, alone, progress=progress(1000), in_flight=False, now_s=100.0) is due


def test_without_a_lease_the_published_limit_holds() -> None:
    for h, due in ((MAX_H_WITHOUT_LEASE - 1, False), (MAX_H_WITHOUT_LEASE, True)):
        alone = solitude(60.0)
        assert autonomous_sync_due(limits_of(None), alone, progress=progress(h), in_flight=False, now_s=0.0) is due


@pytest.mark.parametrize(
    ("seq", "epoch", "expected"), [(6, 3, True), (6, 4, True), (5, 3, False), (4, 3, False), (6, 2, False)]
)
def test_directives_of_an_old_epoch_and_repeats_do_not_count(seq: int, epoch: int, expected: bool) -> None:
    assert counts(directive(DirectiveKind.SYNC, seq=seq, epoch=epoch), lease_epoch=3, last_seq=5) is expected


def test_a_sync_directive_becomes_a_command_with_a_deadline() -> None:
    told = sync_command(directive(DirectiveKind.SYNC, deadline_s=50.0), TIMES, epoch=1, now_s=10.0)
    assert told == SyncCommand(round=2, epoch=3, deadline_s=50.0, pull_grace_s=5.0)
    late = sync_command(directive(DirectiveKind.SYNC), TIMES, epoch=1, now_s=10.0)
    assert late.deadline_s == 10.0 + TIMES.sync_timeout_s


def test_a_sync_that_nobody_directed_closes_before_those_who_wait_for_it_give_up() -> None:
    told = autonomous_command(epoch=3, now_s=100.0, timeout_s=50.0)
    assert told.close_by_s is not None
    assert 100.0 < told.close_by_s < told.deadline_s == 150.0
    assert told.autonomous


def test_deadlines_follow_from_the_lease_and_come_in_their_order() -> None:
    for timeout_s in (0.5, 6.0, 60.0, 3600.0):
        times = times_of(lease().model_copy(update={"sync_timeout_s": timeout_s}))
        assert 0 < times.join_s < times.close_s < timeout_s
        assert times.poll_s < timeout_s
    assert times_of(None).sync_timeout_s == 60.0


def test_a_sync_never_goes_back_to_a_lower_epoch() -> None:
    assert sync_command(directive(DirectiveKind.SYNC, epoch=3), TIMES, epoch=9, now_s=0.0).epoch == 9


def test_pauses_double_up_to_the_longest() -> None:
    assert [backoff_s(n, first_s=0.5, longest_s=3.0) for n in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_deaths_in_quick_succession_add_up_and_a_healthy_life_ends_the_count() -> None:
    assert deaths_in_a_row(2, lived_s=1.0) == 3
    assert deaths_in_a_row(2, lived_s=3600.0) == 1
    assert deaths_in_a_row(2, lived_s=1.0, got_further=True) == 1


@pytest.mark.parametrize(
    ("round_number", "fragments", "leased", "run", "refused"),
    [
        (4, (1,), 3, 3, False),
        (0, (0,), 1, 1, False),
        (4, (1,), 3, None, False),  # no worker has joined yet: the next one finds out
        (4, (0,), 3, 3, True),
        (4, (0, 1), 3, 3, True),
        (4, (1,), 3, 1, True),
        (6, (0,), 3, 1, True),
        (4, (0,), 1, 3, True),
    ],
)
def test_directives_for_other_fragments_than_the_run_has_are_refused(
    round_number: int, fragments: tuple[int, ...], leased: int, run: int | None, refused: bool
) -> None:
    order = Directive(seq=1, kind=DirectiveKind.SYNC, epoch=3, t_s=0.0, round=round_number, fragments=fragments)
    held = lease().model_copy(update={"num_fragments": leased})
    reason = refused_fragments(order, held, num_fragments=run)
    assert (reason is not None) is refused
    if reason is not None:
        assert f"start it with --num-fragments {run}" in reason


def test_ranks_share_out_cores_and_threads() -> None:
    assert [rank_cores((4, 5, 6), rank=rank, num_ranks=2) for rank in range(2)] == [(4, 6), (5,)]
    assert rank_cores((), rank=1, num_ranks=2) == ()
    assert rank_cores((3,), rank=1, num_ranks=2) == (3,)
    assert [rank_threads(7, rank=rank, num_ranks=3) for rank in range(3)] == [3, 2, 2]
    assert [rank_threads(1, rank=rank, num_ranks=3) for rank in range(3)] == [1, 1, 1]
