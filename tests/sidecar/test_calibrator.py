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
)

TRUTH = {Phase.NONE: lambda load: min(0.01 * load, 1.0), Phase.SYNC: lambda load: min(0.05 + 0.04 * load, 1.0)}


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
