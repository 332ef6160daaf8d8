"""What each policy decides between the limits, by tables."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.policy import PolicyContext, make_policy
from controller.policy.base import BudgetView, FleetView, IslandView, ServerView, summarize
from controller.policy.random_deferral import TAIL_FRAC, random_h, random_times_s
from controller.schema import Action, PolicySpec, Reason
from service.errors import InputError

CONTEXT = PolicyContext(min_h=10, max_h=100, seed=7)


def fleet(*, h: int = 50, pressure: float | None = 0.2, budget: BudgetView | None = None) -> FleetView:
    return FleetView(
        islands=(
            IslandView(
                slot=0,
                node="n",
                server_id="s",
                ready=True,
                inner_steps_since_sync=h,
                tokens_since_sync=500_000,
                loss=2.0,
                loss_at_sync=2.025,
            ),
        ),
        servers=(ServerView(server_id="s", node="n", pressure_frac=pressure),),
        budget=budget or BudgetView(),
        min_h=10,
        max_h=100,
        run_started_s=0.0,
    )


@pytest.mark.parametrize(("h", "reason"), [(49, Reason.BELOW_FIXED_H), (50, Reason.FIXED_H_REACHED)])
def test_fixed_h_syncs_from_its_h(h: int, reason: Reason) -> None:
    decision = make_policy(PolicySpec(name="fixed_h", params={"h": 50}), CONTEXT).decide(fleet(h=h), 100.0)
    assert decision.reason is reason
    assert (decision.action is Action.SYNC) == (reason is Reason.FIXED_H_REACHED)


def test_fixed_h_by_default_stays_within_the_limits() -> None:
    decision = make_policy(PolicySpec(name="fixed_h"), CONTEXT).decide(fleet(), 100.0)
    assert decision.terms["fixed_h"] == 100


@pytest.mark.parametrize(
    ("pressure", "reason"),
    [(0.39, Reason.PRESSURE_LOW), (0.4, Reason.PRESSURE_HIGH), (None, Reason.PRESSURE_HIGH)],
)
def test_pressure_gate_syncs_under_its_threshold(pressure: float | None, reason: Reason) -> None:
    policy = make_policy(PolicySpec(name="pressure_gate", params={"threshold": 0.4}), CONTEXT)
    decision = policy.decide(fleet(pressure=pressure), 100.0)
    assert decision.reason is reason
    assert decision.terms["unknown_servers"] == (1 if pressure is None else 0)


def test_wa_diloco_adds_up_the_terms_of_the_paper() -> None:
    view = replace(fleet(), last_transfer_s=2.0)
    terms = make_policy(PolicySpec(name="wa_diloco"), CONTEXT).decide(view, 180.0).terms
    expected = {
        "value_loss": 0.5 * 0.025 / 0.05,
        "value_tokens": 0.5 * 0.5,
        "cost_network": 0.5 * 0.2,
        "cost_inference": 0.75 * 0.2,
        "cost_checkpoint": 0.0,
        "cost_staleness": 0.25 * 0.1,
        "score": 0.5 - (0.1 + 0.15 + 0.025),
        "threshold": 0.0,
    }
    assert {name: terms[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pressure", "reason"), [(0.2, Reason.SCORE_ABOVE_THRESHOLD), (0.9, Reason.SCORE_BELOW_THRESHOLD)]
)
def test_wa_diloco_syncs_above_its_threshold(pressure: float, reason: Reason) -> None:
    assert make_policy(PolicySpec(name="wa_diloco"), CONTEXT).decide(fleet(pressure=pressure), 1.0).reason is reason


def test_wa_diloco_saturates_each_term() -> None:
    view = replace(fleet(pressure=1.0), last_transfer_s=1e9)
    island = replace(view.islands[0], loss=0.0, loss_at_sync=100.0, tokens_since_sync=10**15)
    terms = make_policy(PolicySpec(name="wa_diloco"), CONTEXT).decide(replace(view, islands=(island,)), 1e9).terms
    assert terms["score"] == pytest.approx(0.5 + 0.5 - 0.5 - 0.75 - 0.25)


def test_every_weight_can_be_set() -> None:
    policy = make_policy(PolicySpec(name="wa_diloco", params={"w_inference": 0, "threshold": 0.9}), CONTEXT)
    terms = policy.decide(fleet(pressure=1.0), 1.0).terms
    assert terms["cost_inference"] == 0
    assert terms["threshold"] == 0.9


def test_the_group_is_the_slowest_island_and_the_fullest_server() -> None:
    view = fleet()
    other = IslandView(
        slot=1, node="m", server_id=None, ready=True, inner_steps_since_sync=30, tokens_since_sync=1, loss=1.0
    )
    servers = (*view.servers, ServerView(server_id="t", node="m", pressure_frac=0.6))
    group = summarize(replace(view, islands=(*view.islands, other), servers=servers), 100.0)
    assert (group.h, group.h_max, group.tokens) == (30, 50, 500_001)
    assert (group.pressure, group.unknown_servers) == (0.6, 0)
    assert group.loss_drop == pytest.approx(0.025)
    assert group.staleness_s == 100.0


def test_a_server_that_no_island_is_bound_to_does_not_count() -> None:
    view = fleet()
    servers = (*view.servers, ServerView(server_id="elsewhere", node="m", pressure_frac=None))
    assert summarize(replace(view, servers=servers), 1.0).pressure == 0.2


def test_an_island_without_a_server_has_unknown_pressure() -> None:
    group = summarize(replace(fleet(), servers=()), 1.0)
    assert (group.pressure, group.unknown_servers) == (1.0, 1)


def test_random_deferral_waits_for_the_time_that_was_drawn() -> None:
    budget = BudgetView(outer_syncs=3, horizon_s=100.0, min_gap_s=5.0, started_s=1000.0, spent=1)
    policy = make_policy(PolicySpec(name="random_deferral", params={"draw": 2}), CONTEXT)
    time_s = 1000.0 + random_times_s(3, seed=7, draw=2, horizon_s=100.0, min_gap_s=5.0)[1]
    assert policy.decide(fleet(budget=budget), time_s - 0.01).reason is Reason.BEFORE_RANDOM_TIME
    assert policy.decide(fleet(budget=budget), time_s).reason is Reason.RANDOM_TIME_REACHED


@given(num=st.integers(0, 20), seed=st.integers(0, 100), draw=st.integers(0, 10), gap_s=st.floats(0, 4.5))
def test_random_times_keep_the_gap_and_the_horizon(num: int, seed: int, draw: int, gap_s: float) -> None:
    times_s = random_times_s(num, seed=seed, draw=draw, horizon_s=100.0, min_gap_s=gap_s)
    assert len(times_s) == num
    assert all(later - earlier >= gap_s - 1e-9 for earlier, later in itertools.pairwise(times_s))
    assert all(0 <= time_s <= 100.0 * (1 - TAIL_FRAC) + 1e-9 for time_s in times_s)
    assert times_s == random_times_s(num, seed=seed, draw=draw, horizon_s=100.0, min_gap_s=gap_s)


def test_draws_differ() -> None:
    draws = {
        random_times_s(4, seed=seed, draw=draw, horizon_s=100.0, min_gap_s=5.0) for seed in (0, 1) for draw in (0, 1)
    }
    assert len(draws) == 4


def test_random_times_cover_the_horizon_evenly() -> None:
    draws = [random_times_s(1, seed=0, draw=draw, horizon_s=100.0, min_gap_s=0.0)[0] for draw in range(400)]
    assert sum(draws) / len(draws) == pytest.approx(100.0 * (1 - TAIL_FRAC) / 2, rel=0.1)


def test_without_a_budget_every_round_draws_its_own_h() -> None:
    policy = make_policy(PolicySpec(name="random_deferral"), CONTEXT)
    terms = [policy.decide(replace(fleet(), round=round_), 1.0).terms["random_h"] for round_ in range(50)]
    assert terms == [random_h(seed=7, draw=0, round=round_, min_h=10, max_h=100) for round_ in range(50)]
    assert len(set(terms)) > 20
    assert all(10 <= h <= 100 for h in terms)


@pytest.mark.parametrize(
    ("name", "params", "field", "remedy"),
    [
        ("magic", {}, "name", "random_deferral"),
        ("wa_diloco", {"w_lost": 1}, "params.w_lost", "w_loss"),
        ("no_sync", {"h": 1}, "params.h", "takes: none"),
        ("fixed_h", {"h": 5}, "params.h", "from min_h to max_h"),
        ("fixed_h", {"h": 50.5}, "params.h", "takes: h"),
        ("pressure_gate", {"threshold": 0}, "params.threshold", "takes: threshold"),
        ("wa_diloco", {"tokens_scale": 0}, "params.tokens_scale", "tokens_scale"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(
    name: str, params: dict[str, float | int], field: str, remedy: str
) -> None:
    with pytest.raises(InputError) as caught:
        make_policy(PolicySpec(name=name, params=params), CONTEXT)
    assert caught.value.field == field
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy
