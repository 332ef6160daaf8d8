"""The plan and the result of a switchback experiment, without a controller."""

from __future__ import annotations

import random
from typing import Any

import pytest

from controller.lab_schema import Arm, Block, Disturbance, ExperimentSpec, ExperimentVerdict
from controller.policy import PolicyContext
from controller.policy.base import BudgetView, FleetView, IslandView
from controller.schema import PolicySpec
from controller.switchback import (
    block_order,
    budget_of,
    check_experiment,
    check_time_for_syncs,
    has_equal_syncs,
    policy_of,
    result_of,
    washout_budget,
)
from service.errors import InputError

CONTEXT = PolicyContext(min_h=2, max_h=100, seed=0)
BLOCK_S = 100.0


def spec(**fields: Any) -> ExperimentSpec:
    base = {"a": {"name": "wa_diloco"}, "b": {"name": "random_deferral"}, "block_s": BLOCK_S, "washout_s": 10}
    return ExperimentSpec.model_validate(base | fields)


def block(index: int, arm: Arm, *, requests: float = 1000, violations: float = 10, **fields: Any) -> Block:
    start_s = index * BLOCK_S
    base = {"started_s": start_s, "counts_from_s": start_s + 10, "ends_s": start_s + BLOCK_S, "seen_s": start_s}
    return Block.model_validate(
        {"index": index, "arm": arm, "requests": requests, "violations": violations, "syncs": 2} | base | fields
    )


def simulate(num_pairs: int, rate_a: float, rate_b: float, *, seed: int, **fields: Any) -> list[Block]:
    """Blocks of 500 requests each; the load of the day moves both arms alike."""
    rng = random.Random(seed)
    blocks = []
    for index, arm in enumerate(block_order(2 * num_pairs, seed)):
        rate = (rate_a if arm is Arm.A else rate_b) + 0.02 * rng.random()
        violations = sum(rng.random() < rate for _ in range(500))
        blocks.append(block(index, arm, requests=500, violations=violations, **fields))
    return blocks


def test_each_pair_has_both_arms_in_an_order_of_the_seed() -> None:
    order = block_order(40, seed=3)
    pairs = [set(order[at : at + 2]) for at in range(0, 40, 2)]
    assert pairs == [{Arm.A, Arm.B}] * 20
    assert order == block_order(40, seed=3)
    assert order != block_order(40, seed=4)
    assert {order[at] for at in range(0, 40, 2)} == {Arm.A, Arm.B}


def test_both_arms_have_the_same_budget_and_none_in_the_washout() -> None:
    asked = spec(syncs_per_block=3, min_gap_s=20)
    assert (budget_of(asked).outer_syncs, budget_of(asked).horizon_s, budget_of(asked).min_gap_s) == (3, 90, 20)
    assert washout_budget(asked).outer_syncs == 0


def test_random_deferral_draws_anew_in_each_pair_unless_a_draw_is_given() -> None:
    asked = spec(b={"name": "random_deferral", "params": {"seed": 5}})
    assert [policy_of(asked, Arm.B, pair=pair).params["draw"] for pair in range(3)] == [0, 1, 2]
    assert policy_of(asked, Arm.A, pair=2) == asked.a
    fixed = spec(b={"name": "random_deferral", "params": {"draw": 7}})
    assert policy_of(fixed, Arm.B, pair=2).params == {"draw": 7}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"b": {"name": "wa_diloco"}}, "b"),
        ({"a": {"name": "dance"}}, "a.name"),
        ({"b": {"name": "fixed_h", "params": {"h": 1000}}}, "b.params.h"),
        ({"blocks": 7}, "blocks"),
        ({"washout_s": 100}, "washout_s"),
        ({"washout_s": 500}, "washout_s"),
        ({"syncs_per_block": 10, "min_gap_s": 10}, "syncs_per_block"),
    ],
)
def test_what_contradicts_itself_is_refused_by_field_with_a_remedy(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        check_experiment(spec(**fields), CONTEXT)
    assert refused.value.field == field
    assert refused.value.remedy


def test_a_plan_that_fits_is_accepted() -> None:
    check_experiment(spec(syncs_per_block=9, min_gap_s=10), CONTEXT)


@pytest.mark.parametrize(("step_time_s", "fits"), [(None, True), (1.0, True), (30.0, False)])
def test_a_budget_that_the_islands_cannot_spend_is_refused(step_time_s: float | None, fits: bool) -> None:
    island = IslandView(slot=0, node="host-a", server_id=None, ready=True, step_time_s=step_time_s)
    view = FleetView(islands=(island,), servers=(), budget=BudgetView(), min_h=2, max_h=100, run_started_s=0)
    if fits:
        check_time_for_syncs(spec(syncs_per_block=2), view, 0)
    else:
        with pytest.raises(InputError, match="2 syncs take some 155 s") as refused:
            check_time_for_syncs(spec(syncs_per_block=2), view, 0)
        assert refused.value.field == "syncs_per_block"


def test_the_pace_that_counts_has_the_waits_at_the_gate_in_it() -> None:
    island = IslandView(slot=0, node="host-a", server_id=None, ready=True, step_time_s=1.0)
    view = FleetView(islands=(island,), servers=(), budget=BudgetView(), min_h=2, max_h=100, run_started_s=0)
    check_time_for_syncs(spec(syncs_per_block=2), view, 0, pace_s=0.5)
    with pytest.raises(InputError, match=r"2 syncs take some 155 s at 30 s per inner step"):
        check_time_for_syncs(spec(syncs_per_block=2), view, 0, pace_s=30.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_policy_that_is_truly_better_is_found(seed: int) -> None:
    found = result_of(simulate(12, 0.02, 0.07, seed=seed), num_over=24)
    assert found.verdict is ExperimentVerdict.A_BETTER
    assert found.p_value is not None
    assert found.p_value < 0.01
    assert found.ci95 is not None
    assert found.ci95[1] < 0
    assert found.mean_diff == pytest.approx(-0.05, abs=0.02)
    turned = result_of(simulate(12, 0.07, 0.02, seed=seed), num_over=24)
    assert turned.verdict is ExperimentVerdict.B_BETTER


def test_policies_that_are_alike_are_told_apart_as_seldom_as_the_level_says() -> None:
    wrong = sum(
        result_of(simulate(8, 0.04, 0.04, seed=seed), num_over=16).verdict is not ExperimentVerdict.NO_DIFFERENCE
        for seed in range(200)
    )
    # 5 % of 200, and three standard deviations.
    assert wrong <= 10 + 3 * (200 * 0.05 * 0.95) ** 0.5


def test_few_pairs_say_nothing_however_large_the_difference() -> None:
    found = result_of(simulate(5, 0.01, 0.5, seed=0), num_over=10)
    assert found.verdict is ExperimentVerdict.TOO_FEW_PAIRS
    assert found.mean_diff is not None
    nothing = result_of([], num_over=0)
    assert (nothing.pairs, nothing.verdict, nothing.mean_diff) == (0, ExperimentVerdict.TOO_FEW_PAIRS, None)


def test_a_single_pair_has_a_difference_and_no_interval() -> None:
    found = result_of(simulate(1, 0.01, 0.5, seed=0), num_over=2)
    assert (found.pairs, found.ci95, found.p_value) == (1, None, None)


def test_the_running_block_and_its_pair_do_not_count_yet() -> None:
    blocks = simulate(2, 0.02, 0.02, seed=0)
    assert result_of(blocks[:3], num_over=2).pairs == 1
    assert result_of(blocks, num_over=3).pairs == 1
    assert result_of(blocks, num_over=4).pairs == 2


def test_a_pair_with_a_disturbed_or_empty_block_is_left_out() -> None:
    blocks = simulate(8, 0.02, 0.02, seed=1)
    blocks[3] = blocks[3].model_copy(update={"disturbance": Disturbance.PAUSED})
    blocks[8] = blocks[8].model_copy(update={"requests": 0.0, "violations": 0.0})
    found = result_of(blocks, num_over=16)
    assert (found.pairs, found.pairs_left_out) == (6, 2)


def test_arms_that_spent_different_numbers_of_syncs_are_not_compared_in_timing() -> None:
    blocks = [one.model_copy(update={"syncs": 2 if one.arm is Arm.A else 3}) for one in simulate(8, 0.02, 0.1, seed=2)]
    found = result_of(blocks, num_over=16)
    assert found.verdict is ExperimentVerdict.UNEQUAL_SYNCS
    assert (found.syncs_a, found.syncs_b) == (2, 3)
    assert result_of(blocks, num_over=16, equal_syncs=False).verdict is ExperimentVerdict.A_BETTER


def test_against_no_sync_the_arms_need_not_be_matched() -> None:
    assert has_equal_syncs(spec())
    assert not has_equal_syncs(spec(b={"name": "no_sync"}))


def test_the_excess_is_what_exceeds_the_rate_of_the_other_requests() -> None:
    one = block(0, Arm.A, requests=110, violations=13, requests_in_sync=10, violations_in_sync=8)
    # 5 of 100 others violate, so half a violation of ten would have come anyway.
    assert one.sync_excess == pytest.approx(7.5)
    assert block(0, Arm.A, requests=10, violations=1, requests_in_sync=10, violations_in_sync=1).sync_excess is None
    assert block(0, Arm.A, requests=0, violations=0).sync_excess is None


def test_a_label_names_the_parameters() -> None:
    assert PolicySpec(name="fixed_h", params={"h": 256}).label == "fixed_h:h=256"
