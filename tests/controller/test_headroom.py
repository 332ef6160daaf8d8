"""Headroom: random against best, on costs whose answer is known."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replay
from controller.headroom import (
    MAX_SYNCS,
    NUM_DRAWS,
    Conduct,
    Window,
    assess,
    oracle_costs,
    predictability,
    random_costs,
    start_costs,
)
from controller.headroom_islands import MAX_ISLANDS, assess_islands, sampled
from controller.lab_schema import Headroom, HeadroomVerdict

SINCE_S = 1_700_000_000.0

maybe_costs = st.lists(st.none() | st.floats(0, 5).map(lambda value: round(value, 2)), max_size=12)


def bursts(length: int, *, period: int = 60, busy: int = 20, cost: float = 2.0) -> tuple[float, ...]:
    """Seconds that cost ``cost`` within each burst and nothing between them."""
    return tuple(cost if second % period < busy else 0.0 for second in range(length))


def noise(length: int, seed: int = 0) -> tuple[float, ...]:
    """Independent seconds: each costs 1 with probability 0.3."""
    rng = random.Random(seed)
    return tuple(float(rng.random() < 0.3) for _ in range(length))


def window(
    costs: tuple[float | None, ...],
    *conducts: Conduct,
    num_syncs: int | None = 8,
    min_gap_s: float = 20.0,
    sync_s: float = 3.0,
) -> Window:
    return Window(
        since_s=SINCE_S,
        costs_per_s=costs,
        syncs_per_s=None if num_syncs is None else num_syncs / len(costs),
        min_gap_s=min_gap_s,
        sync_s=sync_s,
        conducts=conducts,
    )


def conduct(*seconds: float, since: float = 0.0, policy: str = "ours") -> Conduct:
    return Conduct(
        policy=policy, shadow=False, since_s=SINCE_S + since, starts_s=tuple(SINCE_S + second for second in seconds)
    )


def brute_force(costs: list[float | None], num_syncs: int, gap: int) -> float:
    schedules = itertools.combinations([at for at, cost in enumerate(costs) if cost is not None], num_syncs)
    fitting = [s for s in schedules if all(later - earlier >= gap for earlier, later in itertools.pairwise(s))]
    return min((sum(costs[at] or 0.0 for at in schedule) for schedule in fitting), default=math.inf)


def test_a_sync_costs_its_seconds_the_last_one_in_part() -> None:
    assert start_costs([1.0, 2.0, 4.0, 8.0], 2.0) == [3, 6, 12]
    assert start_costs([1.0, 2.0, 4.0, 8.0], 2.5) == [5, 10]
    assert start_costs([1.0, 2.0], 0.5) == [0.5, 1.0]
    assert start_costs([1.0, 2.0], 3.0) == []


def test_a_sync_over_an_unknown_second_has_no_cost() -> None:
    assert start_costs([1.0, None, 4.0, 8.0], 2.0) == [None, None, 12]


@given(maybe_costs, st.integers(1, 3), st.integers(1, 5))
def test_the_oracle_is_the_cheapest_of_all_schedules(costs: list[float | None], num_syncs: int, gap: int) -> None:
    found = oracle_costs(costs, num_syncs, gap)
    assert found == pytest.approx([brute_force(costs, number, gap) for number in range(1, num_syncs + 1)])


def test_random_schedules_keep_the_gap_and_are_uniform_in_time() -> None:
    # Two syncs that are 2 apart in 4 seconds leave offsets of 0 or 1 each: {0,2} and {1,3} are half as likely as {0,3}.
    drawn = random_costs([1.0, 10.0, 100.0, 1000.0], 2, 2)
    assert len(drawn) == NUM_DRAWS
    shares = {cost: drawn.count(cost) / NUM_DRAWS for cost in set(drawn)}
    assert shares == {
        101.0: pytest.approx(0.25, abs=0.06),
        1001.0: pytest.approx(0.5, abs=0.07),
        1010.0: pytest.approx(0.25, abs=0.06),
    }


def test_the_mean_of_random_schedules_is_what_any_second_costs() -> None:
    costs = list(bursts(1800))
    drawn = random_costs(costs, 8, 20)
    spread = statistics.pstdev(drawn) / NUM_DRAWS**0.5
    assert statistics.fmean(drawn) == pytest.approx(8 * statistics.fmean(costs), abs=4 * spread)


def test_bursts_leave_enough_headroom_and_lulls_close_it() -> None:
    lulls = conduct(*(30.0 + 60 * 3 * number for number in range(8)), policy="lulls")
    crests = conduct(*(5.0 + 60 * 3 * number for number in range(8)), policy="crests")
    found = assess(window(bursts(1800), lulls, crests))
    assert found.verdict is HeadroomVerdict.ENOUGH
    assert (found.syncs, found.oracle_cost) == (8, 0)
    assert found.random_cost == pytest.approx(8 * 3 * 2.0 / 3, rel=0.1)
    good, bad = found.policies
    assert (good.share_closed, good.cost) == (1.0, 0.0)
    assert good.as_cheap_frac == pytest.approx(0.02, abs=0.02)
    assert bad.cost == 8 * 3 * 2.0
    assert bad.share_closed is not None
    assert bad.share_closed < -1
    assert bad.as_cheap_frac == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_independent_seconds_are_unpredictable_however_low_the_oracle_gets(seed: int) -> None:
    found = assess(window(noise(1800, seed)))
    assert found.verdict is HeadroomVerdict.UNPREDICTABLE
    assert found.gap is not None
    assert found.gap > 0
    assert found.predictability is not None
    assert abs(found.predictability) < 0.08


def test_the_bundled_trace_has_headroom() -> None:
    lines = (Path(replay.__file__).parent / "data" / "bursty.jsonl").read_text().splitlines()
    seconds = Counter(int(json.loads(line)["arrival_s"]) for line in lines)
    found = assess(window(tuple(0.05 * seconds[second] for second in range(max(seconds)))))
    assert found.verdict is HeadroomVerdict.ENOUGH
    assert found.oracle_cost == 0
    assert found.predictability is not None
    assert found.predictability > 0.5


@pytest.mark.parametrize("costs", [(0.0,) * 1800, (0.7,) * 1800, tuple(1 + 0.01 * (t % 40 < 20) for t in range(1800))])
def test_where_every_second_costs_about_the_same_there_is_nothing_to_gain(costs: tuple[float, ...]) -> None:
    found = assess(window(costs, conduct(10, 200)))
    assert found.verdict is HeadroomVerdict.NOTHING_TO_GAIN
    assert found.policies[0].share_closed is None
    assert found.policies[0].cost is not None


def test_a_gap_within_the_spread_of_random_schedules_is_nothing_to_gain() -> None:
    rare = [0.0] * 1800
    rare[900:905] = [50.0] * 5
    assert assess(window(tuple(rare), num_syncs=1)).verdict is HeadroomVerdict.NOTHING_TO_GAIN


@pytest.mark.parametrize(
    "costs",
    [(), (None,) * 1800, bursts(200), (*bursts(400), *(None,) * 1400)],
    ids=["none", "unknown", "short", "gaps"],
)
def test_too_little_data_is_said_and_nothing_else(costs: tuple[float | None, ...]) -> None:
    found = assess(
        Window(since_s=SINCE_S, costs_per_s=costs, syncs_per_s=0.01, min_gap_s=5, sync_s=2, conducts=(conduct(5),))
    )
    assert found.verdict is HeadroomVerdict.TOO_LITTLE_DATA
    assert (found.random_cost, found.oracle_cost, found.gap) == (None, None, None)
    assert found.policies[0].share_closed is None


def test_without_a_budget_the_syncs_of_the_policy_in_force_are_placed() -> None:
    assert assess(window(bursts(1800), conduct(), num_syncs=None)).verdict is HeadroomVerdict.NO_BUDGET
    found = assess(window(bursts(1800), conduct(100, 500, 900), num_syncs=None))
    assert (found.verdict, found.syncs) == (HeadroomVerdict.ENOUGH, 3)


def test_a_policy_is_matched_on_its_own_part_of_the_window() -> None:
    # Half a window of nothing but burst, then half of nothing: whoever came for the second half took no share.
    costs = (*bursts(900, busy=60), *bursts(900))
    (late,) = assess(window(costs, conduct(940, 1100, since=900))).policies
    assert (late.since_s, late.syncs) == (SINCE_S + 900, 2)
    assert late.random_cost == pytest.approx(2 * 3 * 2.0 / 3, rel=0.2)


def test_syncs_over_unknown_seconds_or_not_over_yet_are_not_priced() -> None:
    costs = [*bursts(1800)]
    known: list[float | None] = [*costs]
    known[100] = None
    (found,) = assess(window(tuple(known), conduct(99, 500, 1799))).policies
    assert (found.syncs, found.priced_syncs) == (2, 1)


def test_a_gap_of_years_takes_no_more_memory_than_the_window() -> None:
    tracemalloc.start()
    try:
        found = assess(window(bursts(600), min_gap_s=1e10))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.min_gap_s, most < 10e6) == (1e10, True)
    assert assess(window((), num_syncs=None, min_gap_s=1e10)).verdict is HeadroomVerdict.NO_BUDGET


def test_more_syncs_than_fit_or_than_are_needed_are_cut() -> None:
    found = assess(window(bursts(1800), num_syncs=100, min_gap_s=300))
    assert found.syncs is not None
    assert found.syncs < 8
    many = assess(window(bursts(7200), num_syncs=1000, min_gap_s=1, sync_s=1))
    assert many.syncs == MAX_SYNCS
    assert many.window_s == 7200 * MAX_SYNCS // 1000


def test_predictability_is_one_of_a_slow_series_and_unknown_of_a_flat_one() -> None:
    slow = [float(second // 100 % 2) for second in range(1000)]
    assert predictability(slow, start_costs(slow, 2)) == pytest.approx(1.0, abs=0.05)
    assert predictability([1.0] * 100, [1.0] * 100) is None
    assert predictability([1.0], []) is None


@given(
    st.lists(st.none() | st.floats(0, 1e6), max_size=400),
    st.none() | st.floats(0, 1),
    st.floats(0, 1000),
    st.floats(0, 100),
    st.lists(st.floats(-100, 500), max_size=5),
)
def test_no_window_makes_it_fail(
    costs: list[float | None], rate: float | None, min_gap_s: float, sync_s: float, starts: list[float]
) -> None:
    found = assess(
        Window(
            since_s=SINCE_S,
            costs_per_s=tuple(costs),
            syncs_per_s=rate,
            min_gap_s=min_gap_s,
            sync_s=sync_s,
            conducts=(conduct(*starts),),
        )
    )
    assert Headroom.model_validate_json(found.model_dump_json()) == found


def test_islands_are_judged_by_their_own_costs_and_moments_and_added_up() -> None:
    # Each pays in the half of every minute in which the other does not: together no second is cheaper than another.
    early = tuple(float(second % 60 < 30) for second in range(600))
    late = tuple(1.0 - cost for cost in early)
    together = tuple(one + other for one, other in zip(early, late, strict=True))
    fleet = assess(window(together, conduct(40, 160, 280)))
    assert fleet.verdict is HeadroomVerdict.NOTHING_TO_GAIN
    own = [
        window(early, conduct(40, 160, 280)),
        window(late, conduct(10, 130, 250)),
    ]
    each = assess_islands(own)
    assert (each.verdict, each.islands) == (HeadroomVerdict.ENOUGH, 2)
    assert each.oracle_cost == 0.0
    assert each.random_cost == pytest.approx(fleet.random_cost)
    (policy,) = each.policies
    assert (policy.syncs, policy.cost, policy.share_closed) == (6, 0.0, 1.0)


def test_islands_of_which_too_little_is_known_are_left_out() -> None:
    known = tuple(float(second % 60 < 30) for second in range(600))
    mixed = assess_islands([window((None,) * 600), window(known), window(known[:20])])
    assert (mixed.islands, mixed.verdict) == (1, HeadroomVerdict.ENOUGH)
    assert mixed.gap == assess(window(known)).gap
    none = assess_islands([window((None,) * 600)])
    assert (none.islands, none.verdict, none.gap) == (0, HeadroomVerdict.TOO_LITTLE_DATA, None)


def test_of_many_islands_an_even_sample_is_judged() -> None:
    assert sampled(range(5)) == [0, 1, 2, 3, 4]
    chosen = sampled(range(1000))
    assert len(chosen) <= MAX_ISLANDS
    assert {later - earlier for earlier, later in itertools.pairwise(chosen)} == {63}
