"""The store of a rendezvous: fenced by epochs, bounded in memory."""

from __future__ import annotations

import pytest

from service.errors import ConflictError, InputError, OverloadedError
from service.store import (
    EXPIRE_S,
    IDLE_S,
    MAX_KEY_CHARS,
    MAX_VALUE_BYTES,
    VALUE_OVERHEAD_BYTES,
    Limits,
    Values,
)


def test_what_is_set_is_there_until_it_is_deleted() -> None:
    values = Values()
    assert values.get("g", 1, "a/b", now_s=0) is None
    values.set("g", 1, "a/b", b"\x00x", now_s=0)
    values.set("g", 1, "c", b"", now_s=0)
    assert values.get("g", 1, "a/b", now_s=0) == b"\x00x"
    assert values.get("g", 1, "c", now_s=0) == b""
    assert values.num_keys("g", 1, now_s=0) == 2
    assert values.delete("g", 1, "c", now_s=0)
    assert not values.delete("g", 1, "c", now_s=0)
    assert values.num_keys("g", 1, now_s=0) == 1


def test_counters_begin_at_zero_and_are_text() -> None:
    values = Values()
    assert values.add("g", 1, "n", 3, now_s=0) == 3
    assert values.add("g", 1, "n", -5, now_s=0) == -2
    assert values.get("g", 1, "n", now_s=0) == b"-2"
    values.set("g", 1, "word", b"word", now_s=0)
    with pytest.raises(InputError, match="no number"):
        values.add("g", 1, "word", 1, now_s=0)
    values.set("g", 1, "big", str(2**63 - 1).encode(), now_s=0)
    with pytest.raises(InputError, match="64 bits"):
        values.add("g", 1, "big", 1, now_s=0)


def test_compare_and_set_as_the_stores_of_torch_do() -> None:
    values = Values()
    assert values.compare_set("g", 1, "a", b"", b"x", now_s=0) == b"x"
    assert values.compare_set("g", 1, "b", b"y", b"z", now_s=0) == b"y"
    assert values.get("g", 1, "b", now_s=0) is None
    assert values.compare_set("g", 1, "a", b"n", b"m", now_s=0) == b"x"
    assert values.compare_set("g", 1, "a", b"x", b"m", now_s=0) == b"m"


def test_a_newer_epoch_forgets_the_older_and_refuses_it() -> None:
    values = Values()
    values.set("g", 1, "a", b"old", now_s=0)
    values.set("h", 1, "a", b"other", now_s=0)
    assert values.get("g", 2, "a", now_s=0) is None
    for call in (
        lambda: values.get("g", 1, "a", now_s=0),
        lambda: values.set("g", 1, "a", b"", now_s=0),
        lambda: values.add("g", 1, "a", 1, now_s=0),
        lambda: values.compare_set("g", 1, "a", b"", b"", now_s=0),
        lambda: values.delete("g", 1, "a", now_s=0),
        lambda: values.num_keys("g", 1, now_s=0),
    ):
        with pytest.raises(ConflictError, match="epoch 1 of g is over, 2 is the newest"):
            call()
    assert values.get("h", 1, "a", now_s=0) == b"other"
    assert values.num_bytes == len("a") + len(b"other") + VALUE_OVERHEAD_BYTES


def test_sizes_are_bounded_and_accounted_for() -> None:
    values = Values(Limits(total_bytes=2000, groups=2))
    with pytest.raises(InputError, match="bytes, over"):
        values.set("g", 1, "a", bytes(MAX_VALUE_BYTES + 1), now_s=0)
    with pytest.raises(InputError, match="characters"):
        values.set("g", 1, "k" * (MAX_KEY_CHARS + 1), b"", now_s=0)
    values.set("g", 1, "a", bytes(1700), now_s=0)
    with pytest.raises(OverloadedError, match="all groups together hold 1901 of 2000 bytes"):
        values.set("g", 1, "b", b"", now_s=0)
    values.set("g", 1, "a", bytes(10), now_s=0)
    for number in range(8):
        values.set("g", 1, str(number), b"", now_s=0)
    with pytest.raises(OverloadedError):
        values.set("g", 1, "8", b"", now_s=0)


def test_groups_that_nobody_asks_for_make_room() -> None:
    values = Values(Limits(total_bytes=2000, groups=2))
    values.set("old", 1, "a", bytes(1500), now_s=0)
    values.set("new", 1, "a", bytes(10), now_s=IDLE_S)
    with pytest.raises(OverloadedError, match="2 groups"):
        values.set("third", 1, "a", b"", now_s=IDLE_S)
    values.set("new", 1, "b", bytes(1300), now_s=IDLE_S + 1)
    values.set("third", 1, "a", b"", now_s=IDLE_S + 1)
    assert values.get("new", 1, "a", now_s=IDLE_S + 1) == bytes(10)
    assert values.num_keys("old", 0, now_s=3 * IDLE_S) == 0


def test_one_group_cannot_take_the_room_of_the_others() -> None:
    values = Values(Limits(total_bytes=4000, group_bytes=1000, group_keys=3))
    values.set("greedy", 1, "a", bytes(700), now_s=0)
    with pytest.raises(OverloadedError, match="the group holds 901 of 1000 bytes") as caught:
        values.set("greedy", 1, "b", b"", now_s=0)
    assert (caught.value.field, caught.value.remedy) == ("value", "delete values, or use a new epoch")
    values.set("greedy", 1, "a", b"", now_s=0)
    values.set("greedy", 1, "b", b"", now_s=0)
    values.set("greedy", 1, "c", b"", now_s=0)
    for put in (
        lambda: values.set("greedy", 1, "d", b"", now_s=0),
        lambda: values.add("greedy", 1, "d", 1, now_s=0),
        lambda: values.compare_set("greedy", 1, "d", b"", b"x", now_s=0),
    ):
        with pytest.raises(OverloadedError, match="the group has 3 keys") as caught:
            put()
        assert caught.value.field == "key"
    assert values.get("greedy", 1, "d", now_s=0) is None
    values.set("greedy", 1, "c", b"x", now_s=0)
    values.delete("greedy", 1, "c", now_s=0)
    values.set("greedy", 1, "d", b"", now_s=0)
    values.set("modest", 1, "a", bytes(700), now_s=0)
    values.set("greedy", 2, "a", bytes(700), now_s=0)


def test_a_group_that_nobody_asks_for_expires_though_there_is_room() -> None:
    values = Values()
    values.set("old", 7, "a", b"x", now_s=0)
    values.set("used", 7, "a", b"x", now_s=0)
    for hours in range(24):
        values.get("used", 7, "a", now_s=hours * 3600.0)
    assert values.num_groups == 2
    assert values.get("used", 7, "a", now_s=EXPIRE_S + 1) == b"x"
    assert values.num_groups == 1
    assert values.num_bytes == len("a") + len(b"x") + VALUE_OVERHEAD_BYTES
    assert values.get("old", 1, "a", now_s=EXPIRE_S + 1) is None


def test_a_group_that_is_refused_stays_and_a_failed_one_leaves_nothing() -> None:
    values = Values(Limits(groups=1))
    values.set("g", 2, "a", b"x", now_s=0)
    with pytest.raises(ConflictError):
        values.get("g", 1, "a", now_s=1)
    with pytest.raises(OverloadedError, match="the store has 1 groups") as caught:
        values.set("h", 1, "a", b"", now_s=1)
    assert caught.value.field == "group"
    assert (values.get("g", 2, "a", now_s=1), values.num_groups) == (b"x", 1)
