"""Each sample is judged alone, and unknown load is not zero."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from controller import samples
from controller.samples import FORGET_AFTER_S, SampleBook, SampleLog, SampleOutcome
from sidecar.schema import LoadSample
from tests.controller.helpers import START_S, sample


def book() -> SampleBook:
    return SampleBook([], stale_after_s=5.0)


@pytest.mark.parametrize(
    ("raw", "outcome"),
    [
        (sample(), SampleOutcome.ACCEPTED),
        (sample(t_s=START_S + 4), SampleOutcome.ACCEPTED),
        (sample(t_s=START_S + 6), SampleOutcome.FROM_FUTURE),
        (sample(t_s=START_S - 61), SampleOutcome.TOO_OLD),
        (sample(t_s=float("nan")), SampleOutcome.INVALID),
        (sample(pressure_frac=1.5), SampleOutcome.INVALID),
        (sample(running=-1), SampleOutcome.INVALID),
        (sample(server_id="\ud800"), SampleOutcome.INVALID),
        ({}, SampleOutcome.INVALID),
        (None, SampleOutcome.INVALID),
        ([1], SampleOutcome.INVALID),
        ("x" * 10_000, SampleOutcome.INVALID),
    ],
)
def test_a_sample_is_taken_or_refused_with_a_reason(raw: object, outcome: SampleOutcome) -> None:
    assert book().offer(raw, START_S).outcome is outcome


def test_what_is_wrong_is_named() -> None:
    assert book().offer(sample(running=-1), START_S).detail.startswith("running: ")


def test_duplicates_and_older_samples_change_nothing() -> None:
    samples = book()
    samples.offer(sample(pressure_frac=0.4), START_S)
    assert samples.offer(sample(pressure_frac=0.9), START_S).outcome is SampleOutcome.DUPLICATE
    assert samples.offer(sample(t_s=START_S - 1), START_S).outcome is SampleOutcome.OUT_OF_ORDER
    assert samples.views_beside([("host-a", None)], START_S)[0].pressure_frac == 0.4


@pytest.mark.parametrize(
    ("fields", "age_s", "pressure"),
    [
        ({}, 5.0, 0.2),
        ({}, 5.1, None),
        ({"pressure_frac": None}, 0.0, None),
        ({"state": "starting"}, 0.0, None),
        ({"state": "stale"}, 0.0, None),
        ({"state": "stalled"}, 0.0, None),
        ({"state": "down"}, 0.0, None),
        ({"state": "metrics_disabled"}, 0.0, None),
        ({"state": "sleeping"}, 0.0, 0.2),
    ],
)
def test_load_is_known_while_it_is_fresh_and_the_engine_serves(
    fields: dict[str, Any], age_s: float, pressure: float | None
) -> None:
    samples = book()
    samples.offer(sample(**fields), START_S)
    now_s = START_S + age_s
    assert samples.views_beside([("host-a", None)], now_s)[0].pressure_frac == pressure
    assert samples.statuses(now_s)[0].known is (pressure is not None)
    assert samples.num_known(now_s) == ((1, 0) if pressure is not None else (0, 1))


def test_a_server_that_is_gone_for_good_is_forgotten() -> None:
    samples = book()
    samples.offer(sample(), START_S)
    samples.forget(START_S + FORGET_AFTER_S)
    assert samples.num_known(START_S)[0] == 1
    samples.forget(START_S + FORGET_AFTER_S + 1)
    assert samples.num_known(START_S) == (0, 0)


def test_the_log_gets_every_sample_unless_an_interval_is_set() -> None:
    log = SampleLog(0.0)
    assert all(log.is_due(LoadSample.model_validate(sample(t_s=START_S + second))) for second in (0, 0.1, 0.2))


def test_the_log_gets_one_sample_per_server_and_interval() -> None:
    log = SampleLog(10.0)
    names = [f"vllm-{number}" for number in range(200)]
    logged: dict[str, list[int]] = {name: [] for name in names}
    for second in range(100):
        for name in names:
            if log.is_due(LoadSample.model_validate(sample(name, START_S + second))):
                logged[name].append(second)
    for first, *others in logged.values():
        assert first == 0
        assert 1 <= others[0] <= 10
        assert [later - earlier for earlier, later in pairwise(others)] == [10] * (len(others) - 1)
    # They have their turns one after another: no second writes much more than its tenth.
    assert max(Counter(second for _, *others in logged.values() for second in others).values()) < 40


def test_servers_that_are_silent_for_long_are_named_when_they_are_forgotten() -> None:
    samples = book()
    samples.offer(sample("old", START_S), START_S)
    samples.offer(sample("young", START_S + 60), START_S + 60)
    assert samples.forget(START_S + FORGET_AFTER_S + 1) == ["old"]
    assert samples.forget(START_S + FORGET_AFTER_S + 1) == []


def test_where_there_is_no_room_who_was_silent_for_long_gives_way_to_a_live_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samples, "MAX_SERVERS", 3)
    taken = book()
    for number, t_s in enumerate((START_S, START_S + 1, START_S + 30)):
        assert taken.offer(sample(f"made-up-{number}", t_s), t_s).outcome is SampleOutcome.ACCEPTED
    refused = taken.offer(sample("live", START_S + 50), START_S + 50)
    assert refused.outcome is SampleOutcome.TOO_MANY_SERVERS
    assert refused.detail == "3 servers are known, and were heard of within 60 s"
    monkeypatch.setattr(samples, "FORGET_AT_ONCE", 1)
    for number, name in enumerate(("live", "other")):
        now_s = START_S + 62 + 2 * number
        assert taken.offer(sample(name, now_s), now_s).outcome is SampleOutcome.ACCEPTED
    assert set(taken.server_ids) == {"made-up-2", "live", "other"}
    assert taken.forget(START_S + 65) == ["made-up-0", "made-up-1"]
    assert taken.forget(START_S + 65) == []


def test_a_server_that_gave_way_and_came_back_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_SERVERS", 1)
    taken = book()
    for name, t_s in (("a", START_S), ("b", START_S + 61), ("a", START_S + 130)):
        assert taken.offer(sample(name, t_s), t_s).outcome is SampleOutcome.ACCEPTED
    assert taken.forget(START_S + 130) == ["b"]
