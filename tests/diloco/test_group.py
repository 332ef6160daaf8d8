"""Process groups of real processes over the HTTP store: made, used, broken and made anew."""

from __future__ import annotations

import time

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from diloco.group import open_group
from tests.diloco.rank_process import TIMEOUT_S, Ranks, all_do

pytestmark = pytest.mark.integration

MANY = 40
MARGIN_S = 15.0
"""A machine may stand still for a while."""


def test_a_killed_peer_is_an_error_in_time_and_a_new_group_works_at_once(ranks: Ranks) -> None:
    three = ranks(3)
    assert all_do(three, "open", 1, 3) == ["open"] * 3
    assert all_do(three, "sum", 1_000_000) == [6.0] * 3
    first, second, last = three
    started_s = time.monotonic()
    for rank in (first, second):
        rank.tell("sum", 1_000_000)
    last.kill()
    answers = [first.answer(), second.answer()]
    assert all(answer.startswith("PeerLostError") for answer in answers), answers
    assert time.monotonic() - started_s < TIMEOUT_S + MARGIN_S
    survivors = [first, second]
    assert all_do(survivors, "close") == ["closed"] * 2
    assert all_do(survivors, "open", 2, 2) == ["open"] * 2
    assert all_do(survivors, "sum", 10) == [3.0] * 2


def test_a_rank_that_does_not_come_is_an_error_in_time_and_an_old_epoch_is_refused(ranks: Ranks) -> None:
    two = ranks(2)
    first, second = two
    assert all_do(two, "open", 1, 2) == ["open"] * 2
    assert all_do(two, "close") == ["closed"] * 2
    started_s = time.monotonic()
    first.tell("open", 2, 2)
    assert first.answer().startswith("PeerLostError")
    assert time.monotonic() - started_s < TIMEOUT_S + MARGIN_S
    second.tell("open", 1, 2)
    answer = second.answer()
    assert "epoch 1 of run/slot-0 is over, 2 is the newest" in answer, answer


def test_many_groups_one_after_another_leave_nothing_behind(ranks: Ranks) -> None:
    three = ranks(3)
    for epoch in range(5):
        assert all_do(three, "use_and_close", epoch, 3) == [6.0] * 3
    before = all_do(three, "footprint")
    for epoch in range(5, 5 + MANY):
        assert all_do(three, "use_and_close", epoch, 3) == [6.0] * 3
    for old, new in zip(before, all_do(three, "footprint"), strict=True):
        # A thread that ends may still be counted for a moment.
        assert new["threads"] <= old["threads"] + 2
        assert new["descriptors"] <= old["descriptors"] + 2
        assert new["mib"] <= old["mib"] + 8


def test_a_part_of_the_store_is_enough_to_meet_over() -> None:
    """As NCCL does, whose keys must not be gloo's."""
    store = HashStore()
    first = open_group(store, rank=0, num_ranks=1, timeout_s=TIMEOUT_S)
    second = open_group(PrefixStore("other", store), rank=0, num_ranks=1, timeout_s=TIMEOUT_S)
    for group in (first, second):
        tensor = torch.ones(3)
        group.start_sum(tensor).wait()
        assert tensor.tolist() == [1.0] * 3
        assert group.close()
