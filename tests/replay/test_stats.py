import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.stats import (
    Outcome,
    compare,
    gap_closed,
    mean_by_seed,
    percentiles,
    sync_excess_rate,
)
from replay.summary import Percentiles, Run

numbers = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


def run(policy: str, seed: int = 0, draw: int = 0, *, rate: float = 0.0, e2e_p95_ms: float | None = None) -> Run:
    e2e_ms = None if e2e_p95_ms is None else Percentiles(p50=1, p95=e2e_p95_ms, p99=e2e_p95_ms)
    return Run(
        policy=policy,
        seed=seed,
        draw=draw,
        mode="live",
        requests=100,
        violations=round(100 * rate),
        violation_rate=rate,
        sync_excess_rate=None,
        ttft_ms=None,
        itl_ms=None,
        e2e_ms=e2e_ms,
        outer_syncs=0,
        sync_busy_s=0,
        tokens_trained=0,
        final_loss=None,
        loadgen_late_p99_ms=None,
    )


def test_percentiles_interpolate_and_are_unknown_without_values() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == Percentiles(p50=3, p95=3, p99=3)
    found = percentiles([float(value) for value in range(101)])
    assert found == Percentiles(p50=50, p95=95, p99=99)


@given(st.lists(numbers, min_size=1))
def test_percentiles_are_ordered_and_within_the_values(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p95 <= found.p99 <= max(values)


OUTSIDE = [Outcome(index, index + 0.5, violated=index == 0) for index in range(10)]


def test_the_excess_is_what_exceeds_the_rate_of_the_others() -> None:
    during = [Outcome(20.0 + index, 20.5 + index, violated=index < 3) for index in range(5)]
    # 1 of 10 others violates, so of 5 during the sync 0.5 would anyway: (3 - 0.5) / 15.
    assert sync_excess_rate(OUTSIDE + during, [(20, 22.2), (22, 30)]) == pytest.approx(2.5 / 15)


def test_requests_that_only_touch_a_sync_meet_it() -> None:
    outcomes = [Outcome(0, 1, violated=True), Outcome(2, 3, violated=True), Outcome(1.4, 1.6, violated=False)]
    assert sync_excess_rate([*outcomes, Outcome(9, 9.5, violated=False)], [(1, 2)]) == pytest.approx(2 / 4)


def test_a_long_request_meets_a_short_sync_inside_it_and_a_later_one_does_not_hide_it() -> None:
    outcomes = [Outcome(0, 10, violated=True), Outcome(30, 31, violated=False)]
    assert sync_excess_rate(outcomes, [(40, 41), (5, 5.1)]) == pytest.approx(0.5)


def test_the_excess_is_zero_without_syncs_and_unknown_without_others() -> None:
    assert sync_excess_rate(OUTSIDE, []) == 0
    assert sync_excess_rate(OUTSIDE, [(0, 100)]) is None
    assert sync_excess_rate([], []) is None
    assert sync_excess_rate([], [(0, 1)]) is None


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10), st.booleans()), max_size=30),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=6),
)
def test_the_excess_agrees_with_the_definition(
    requests: list[tuple[float, float, bool]], syncs: list[tuple[float, float]]
) -> None:
    outcomes = [Outcome(start, start + length, violated) for start, length, violated in requests]
    windows = [(start, start + length) for start, length in syncs]
    inside = [o for o in outcomes if any(start <= o.end_s and end >= o.start_s for start, end in windows)]
    others = [o for o in outcomes if o not in inside]
    found = sync_excess_rate(outcomes, windows)
    if not others:
        assert found is None or not windows
    else:
        rate = sum(o.violated for o in others) / len(others)
        expected = (sum(o.violated for o in inside) - rate * len(inside)) / len(outcomes)
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_comparison_pairs_seeds_and_averages_draws() -> None:
    runs = [
        run("ours", 0, rate=0.04),
        run("ours", 1, rate=0.10),
        run("ours", 7, rate=0.99),
        run("random_deferral", 0, 0, rate=0.05),
        run("random_deferral", 0, 1, rate=0.07),
        run("random_deferral", 1, 0, rate=0.10),
    ]
    found = compare(runs, a="ours", b="random_deferral")
    assert found is not None
    assert found.n == 2
    assert found.mean_diff == pytest.approx(-0.01)
    assert found.ci95 is not None
    assert found.ci95[0] == pytest.approx(-0.02)
    assert found.ci95[1] == pytest.approx(0.0)
    assert found.p_value == 1.0


def test_a_single_seed_has_a_difference_and_no_interval() -> None:
    found = compare([run("ours", 0, rate=0.04), run("random_deferral", 0, rate=0.05)], a="ours", b="random_deferral")
    assert found is not None
    assert found.mean_diff == pytest.approx(-0.01)
    assert (found.ci95, found.p_value, found.n) == (None, None, 1)


def test_a_comparison_without_a_common_seed_or_metric_is_none() -> None:
    runs = [run("a", 0), run("b", 1), run("c", 0, e2e_p95_ms=5)]
    assert compare(runs, a="a", b="b") is None
    assert compare(runs, a="a", b="absent") is None
    assert compare(runs, a="a", b="c", metric="e2e_ms.p95") is None


def test_metrics_of_draws_are_averaged_and_unknown_ones_left_out() -> None:
    runs = [run("a", 0, 0, e2e_p95_ms=10), run("a", 0, 1, e2e_p95_ms=20), run("a", 1, 0), run("b", 0, e2e_p95_ms=1)]
    assert mean_by_seed(runs, "a", "e2e_ms.p95") == {0: 15}


def test_the_gap_is_closed_from_random_to_oracle() -> None:
    runs = [
        run("no_sync", rate=0.01),
        run("random_deferral", 0, 0, rate=0.06),
        run("random_deferral", 0, 1, rate=0.08),
        run("oracle", rate=0.03),
        run("half", rate=0.05),
        run("worse", rate=0.09),
        run("perfect", rate=0.03),
    ]
    assert gap_closed(runs) == {
        "half": pytest.approx(0.5),
        "worse": pytest.approx(-0.5),
        "perfect": pytest.approx(1.0),
    }


def test_the_gap_is_unknown_without_oracle_or_without_a_gap() -> None:
    ours, uniform = run("ours", rate=0.05), run("random_deferral", rate=0.05)
    assert gap_closed([ours, uniform]) == {"ours": None}
    assert gap_closed([ours, uniform, run("oracle", rate=0.05)]) == {"ours": None}
    assert gap_closed([ours, uniform, run("oracle", rate=0.06)]) == {"ours": None}
    assert gap_closed([ours, uniform, run("oracle", seed=1, rate=0.01)]) == {"ours": None}
