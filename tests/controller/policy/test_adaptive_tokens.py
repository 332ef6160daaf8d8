"""``adaptive_tokens``: a target of tokens that follows the budget and the rate of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.policy import make_policy
from controller.policy.base import BudgetView, Decision, FleetView
from controller.schema import Action, PolicySpec, Reason
from tests.controller.policy.views import CONTEXT, fleet, island


def decide(view: FleetView, now_s: float = 200.0, **params: float) -> Decision:
    return make_policy(PolicySpec(name="adaptive_tokens", params=params), CONTEXT).decide(view, now_s)


def test_without_a_budget_the_target_is_the_middle_of_the_limits() -> None:
    below, reached = decide(fleet(island(31))), decide(fleet(island(32)))
    assert below.terms["target_tokens"] == pytest.approx(1000 * (10 * 100) ** 0.5)
    assert (below.reason, reached.reason) == (Reason.TOKENS_BELOW_TARGET, Reason.TOKENS_REACHED)


def test_the_target_is_the_mean_rate_times_the_share_of_the_budget() -> None:
    # 100,000 tokens in 200 s; from the last sync 300 s for 9 syncs and the time after the last: 30 s, 15,000 tokens.
    budget = BudgetView(outer_syncs=10, horizon_s=440.0, spent=1, last_sync_s=140.0)
    terms = decide(fleet(island(20, tokens=100_000), budget=budget)).terms
    assert terms["target_tokens"] == pytest.approx(15_000)
    assert decide(fleet(island(20, tokens=100_000), budget=budget), scale=2.0).terms["target_tokens"] == 30_000


def test_the_target_stays_within_the_limits_of_h() -> None:
    few = BudgetView(outer_syncs=1, horizon_s=1e6)
    many = BudgetView(syncs_per_hour=3600.0)
    assert decide(fleet(island(20), budget=few)).terms["target_tokens"] == 100 * 1000
    assert decide(fleet(island(20), budget=many)).terms["target_tokens"] == 10 * 1000


def test_all_islands_count_together() -> None:
    view = fleet(island(40), island(60, slot=1, tokens_since_sync=120_000))
    terms = decide(view).terms
    assert terms["tokens_per_step"] == 3000
    assert decide(view).action is Action.SYNC


def test_islands_that_took_no_step_are_waited_for() -> None:
    view = replace(fleet(island(0)), min_h=1)
    assert decide(view).action is Action.DEFER
