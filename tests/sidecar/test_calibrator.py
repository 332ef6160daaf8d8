"""The calibrator: truth is recovered, load never helps, few data stay near the prior, unknown counts as harmful."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.calibrator import (
    LOAD_EDGES,
    NUM_BINS,
    Calibrator,
    CalibratorState,
    LoadForecast,
    Phase,
    bin_of,
    pool_adjacent_violators,
    wilson_interval,
)

TRUTH = {
    Phase.NONE: lambda load: min(0.01 * load, 1.0),
    Phase.INNER: lambda load: min(0.02 + 0.02 * load, 1.0),
    Phase.SYNC: lambda load: min(0.05 + 0.04 * load, 1.0),
}


def taught(*phases: Phase, num: int = 4000, seed: int = 1) -> Calibrator:
    rng, calibrator = random.Random(seed), Calibrator()
    for _ in range(num):
        phase, load = rng.choice(phases), rng.randint(0, 15)
        violations = sum(rng.random() < TRUTH[phase](load) for _ in range(3))
        calibrator.observe(load=load, phase=phase, requests=3, violations=violations)
    return calibrator


@pytest.mark.parametrize("phase", [Phase.NONE, Phase.SYNC])
@pytest.mark.parametrize("load", [0, 2, 5, 7, 14])
def test_the_truth_is_recovered(phase: Phase, load: int) -> None:
    estimate = taught(Phase.NONE, Phase.SYNC).probability(load, phase)
    low_edge = max((edge for edge in LOAD_EDGES if edge <= load), default=0.0)
    high_edge = min(edge for edge in LOAD_EDGES if edge > load) - 1
    assert TRUTH[phase](low_edge) - 0.03 <= estimate.probability <= TRUTH[phase](high_edge) + 0.03
    assert estimate.low <= estimate.probability <= estimate.high
    assert estimate.requests > 100


def test_more_requests_make_the_interval_narrower() -> None:
    few, many = taught(Phase.NONE, num=100), taught(Phase.NONE, num=5000)
    widths = [e.high - e.low for e in (few.probability(5, Phase.NONE), many.probability(5, Phase.NONE))]
    assert widths[1] < widths[0] / 2


def test_one_bad_request_is_no_proof() -> None:
    calibrator = Calibrator()
    calibrator.observe(load=3, phase=Phase.NONE, requests=1, violations=1)
    assert calibrator.probability(3, Phase.NONE).probability < 0.3


def test_loads_that_were_never_seen_go_along_with_those_below() -> None:
    calibrator = taught(Phase.NONE)
    seen, unseen = calibrator.probability(14, Phase.NONE), calibrator.probability(200, Phase.NONE)
    assert unseen.probability == pytest.approx(seen.probability, abs=0.01)
    assert unseen.requests == 0


def test_a_sync_that_was_never_seen_counts_as_harmful() -> None:
    calibrator = taught(Phase.NONE)
    (cost,) = calibrator.sync_costs([LoadForecast(0.0, 2.0, 4.0)], duration_s=5.0)
    assert cost.violations == pytest.approx(2.0 * 5.0 * 0.2, rel=0.05)


def test_syncs_that_did_no_harm_cost_nothing_in_the_end() -> None:
    calibrator = Calibrator()
    for _ in range(1000):
        for phase in (Phase.NONE, Phase.SYNC):
            calibrator.observe(load=4, phase=phase, requests=2, violations=0)
    (cost,) = calibrator.sync_costs([LoadForecast(0.0, 2.0, 4.0)], duration_s=5.0)
    assert cost.violations < 0.05


def test_a_sync_costs_more_where_more_load_and_more_arrivals_are_expected() -> None:
    calibrator = taught(Phase.NONE, Phase.SYNC)
    ahead = [LoadForecast(0.0, 1.0, 1.0), LoadForecast(5.0, 1.0, 10.0), LoadForecast(30.0, 3.0, 10.0)]
    costs = calibrator.sync_costs(ahead, duration_s=4.0)
    assert [cost.start_s for cost in costs] == [0.0, 5.0, 30.0]
    assert costs[0].violations < costs[1].violations < costs[2].violations
    assert costs[2].violations == pytest.approx(3 * costs[1].violations)


FORECASTS = st.lists(
    st.builds(LoadForecast, st.floats(0, 60), st.floats(0, 1e3), st.floats(0, 300)), min_size=1, max_size=10
)


@given(FORECASTS, st.floats(0.1, 600), st.integers(0, 2**32))
def test_a_cost_is_never_negative_and_grows_with_what_meets_the_sync(
    ahead: list[LoadForecast], duration_s: float, seed: int
) -> None:
    calibrator = taught(*Phase, num=30, seed=seed)
    costs = calibrator.sync_costs(ahead, duration_s=duration_s)
    assert [cost.start_s for cost in costs] == [forecast.start_s for forecast in ahead]
    for cost, forecast in zip(costs, ahead, strict=True):
        assert 0 <= cost.violations <= forecast.arrivals_per_s * duration_s
    longer = calibrator.sync_costs(ahead, duration_s=2 * duration_s)
    assert [cost.violations for cost in longer] == pytest.approx([2 * cost.violations for cost in costs])


def test_the_lull_ahead_is_the_cheapest_start() -> None:
    calibrator = taught(Phase.NONE, Phase.SYNC)
    ahead = [
        LoadForecast(start_s, 4.0 if start_s < 30 else 0.2, 12.0 if start_s < 30 else 0.5) for start_s in range(60)
    ]
    costs = calibrator.sync_costs(ahead, duration_s=3.0)
    assert min(costs, key=lambda cost: cost.violations).start_s == 30


def test_old_observations_fade() -> None:
    calibrator = Calibrator()
    for violations in (1, 0):
        for _ in range(3000):
            calibrator.observe(load=4, phase=Phase.NONE, requests=100, violations=100 * violations)
    assert calibrator.probability(4, Phase.NONE).probability < 0.1


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e4), st.sampled_from(list(Phase)), st.integers(0, 50), st.floats(0, 1, allow_nan=False)
        ),
        max_size=60,
    )
)
def test_probabilities_never_fall_with_load(data: list[tuple[float, Phase, int, float]]) -> None:
    calibrator = Calibrator()
    for load, phase, requests, share in data:
        calibrator.observe(load=load, phase=phase, requests=requests, violations=int(share * requests))
    for phase in Phase:
        curve = calibrator.curve(phase)
        assert len(curve) == NUM_BINS
        assert all(0 <= e.low <= e.probability <= e.high <= 1 for e in curve)
        assert all(a.probability <= b.probability + 1e-12 for a, b in pairwise(curve))


COUNTS = st.lists(
    st.tuples(st.sampled_from(LOAD_EDGES), st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=NUM_BINS
)


@given(COUNTS)
def test_an_estimate_lies_between_what_was_counted_and_the_prior(counts: list[tuple[float, int, float]]) -> None:
    calibrator, rates = Calibrator(), []
    for load, requests, share in counts:
        calibrator.observe(load=load, phase=Phase.NONE, requests=requests, violations=int(share * requests))
    for load, *_ in counts:
        state, index = calibrator.export(), bin_of(load)
        rates.append(state.violations[Phase.NONE][index] / state.requests[Phase.NONE][index])
    overall = [calibrator._rate(Phase.NONE)]
    for estimate in calibrator.curve(Phase.NONE):
        assert min(rates + overall) - 1e-9 <= estimate.probability <= max(rates + overall) + 1e-9


@given(st.floats(0, 1), st.integers(1, 60), st.integers(2, 100))
def test_the_same_share_among_more_requests_moves_further_from_the_prior(share: float, few: int, times: int) -> None:
    distances = []
    for num in (few, few * times):
        calibrator = Calibrator()
        # Much elsewhere holds the prior in place.
        calibrator.observe(load=0, phase=Phase.NONE, requests=10**6, violations=0)
        calibrator.observe(load=300, phase=Phase.NONE, requests=num, violations=share * num)
        distances.append(abs(calibrator.probability(300, Phase.NONE).probability - share))
    assert distances[1] <= distances[0] + 1e-6


@pytest.mark.parametrize("truth", [0.0, 0.01, 0.1, 0.5, 0.99])
def test_intervals_hold_the_truth_as_often_as_they_say(truth: float) -> None:
    rng, held = random.Random(3), 0
    for _ in range(200):
        calibrator = Calibrator()
        violations = sum(rng.random() < truth for _ in range(500))
        calibrator.observe(load=3, phase=Phase.NONE, requests=500, violations=violations)
        estimate = calibrator.probability(3, Phase.NONE)
        held += estimate.low <= truth + 1e-3 and truth - 1e-3 <= estimate.high
    assert held >= 0.85 * 200


@given(st.floats(0, 1), st.floats(0.5, 1e6))
def test_wilson_holds_the_share_and_stays_within_0_and_1(share: float, num: float) -> None:
    low, high = wilson_interval(share, num)
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1


def test_wilson_is_that_of_the_textbook() -> None:
    # Newcombe (1998), table I: 81 of 263 at 95 %.
    assert wilson_interval(81 / 263, 263, z=1.959964) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"load": float("nan")},
        {"load": -1.0},
        {"violations": 3},
        {"violations": -1},
        {"requests": float("inf"), "violations": 0},
    ],
)
def test_what_cannot_be_is_ignored(wrong: dict[str, float]) -> None:
    calibrator = Calibrator()
    calibrator.observe(**{"load": 1.0, "requests": 2, "violations": 1, "phase": Phase.NONE, **wrong})  # type: ignore[arg-type]
    assert calibrator.num_requests(Phase.NONE) == 0


@pytest.mark.parametrize(("load", "index"), [(0, 0), (0.5, 0), (1, 1), (5, 4), (1e9, NUM_BINS - 1)])
def test_loads_have_their_bins(load: float, index: int) -> None:
    assert bin_of(load) == index


def test_pooling_is_the_weighted_isotonic_fit() -> None:
    pooled = pool_adjacent_violators([0.1, 0.4, 0.2, 0.9], [1.0, 1.0, 3.0, 1.0])
    assert [mean for mean, _ in pooled] == pytest.approx([0.1, 0.25, 0.25, 0.9])
    assert [weight for _, weight in pooled] == [1.0, 4.0, 4.0, 1.0]


def test_counts_survive_export_and_import() -> None:
    calibrator, after = taught(Phase.NONE, Phase.SYNC), Calibrator()
    after.restore(CalibratorState.model_validate_json(calibrator.export().model_dump_json()))
    for phase in Phase:
        assert after.curve(phase) == calibrator.curve(phase)


def test_counts_that_do_not_fit_are_refused() -> None:
    state = taught(Phase.NONE).export()
    counts = dict(state.requests)
    for wrong in (
        state.model_copy(update={"edges": [1.0]}),
        state.model_copy(update={"requests": {}}),
        state.model_copy(update={"requests": {**counts, Phase.NONE: [1.0]}}),
        state.model_copy(update={"requests": {**counts, Phase.NONE: [0.0] * NUM_BINS}}),
    ):
        with pytest.raises(ValueError, match="calibration"):
            Calibrator().restore(wrong)
