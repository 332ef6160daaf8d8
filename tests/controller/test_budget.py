"""Budgets that contradict themselves, and what a period counts."""

from __future__ import annotations

import pytest

from controller.budget import check_budget, is_over, new_period, with_sync_spent, with_sync_started
from controller.schema import BudgetSpec
from service.errors import InputError


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (BudgetSpec(outer_syncs=5, horizon_s=40, min_gap_s=10), "horizon_s"),
        (BudgetSpec(outer_syncs=None, horizon_s=40), "outer_syncs"),
        (BudgetSpec(outer_syncs=5, syncs_per_hour=40), "syncs_per_hour"),
        (BudgetSpec(horizon_s=40, syncs_per_hour=40), "syncs_per_hour"),
        (BudgetSpec(syncs_per_hour=40, min_gap_s=91), "syncs_per_hour"),
        (BudgetSpec(syncs_per_hour=40, max_defer_s=89), "max_defer_s"),
        (BudgetSpec(min_gap_s=20, max_defer_s=19), "max_defer_s"),
        (BudgetSpec(outer_syncs=4, horizon_s=100, max_defer_s=19), "max_defer_s"),
    ],
)
def test_a_budget_that_cannot_work_is_refused_with_the_remedy(spec: BudgetSpec, field: str) -> None:
    with pytest.raises(InputError) as caught:
        check_budget(spec)
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize(
    "spec",
    [
        BudgetSpec(),
        BudgetSpec(min_gap_s=10),
        BudgetSpec(outer_syncs=5),
        BudgetSpec(outer_syncs=5, horizon_s=41, min_gap_s=10),
        BudgetSpec(outer_syncs=0, horizon_s=1, min_gap_s=10),
        BudgetSpec(syncs_per_hour=40, min_gap_s=90, max_defer_s=90),
        BudgetSpec(outer_syncs=4, horizon_s=100, max_defer_s=20),
        BudgetSpec(max_defer_s=1),
    ],
)
def test_a_budget_that_fits_is_taken(spec: BudgetSpec) -> None:
    check_budget(spec)


def test_a_period_counts_its_syncs_and_ends() -> None:
    budget = new_period(BudgetSpec(outer_syncs=2, horizon_s=100), now_s=50.0)
    assert (budget.remaining, is_over(budget, 60.0)) == (2, False)
    budget = with_sync_spent(with_sync_started(budget, 70.0))
    assert (budget.spent, budget.remaining, budget.last_sync_s) == (1, 1, 70.0)
    assert with_sync_started(budget, 60.0).last_sync_s == 70.0
    assert is_over(budget, 150.0)
    assert is_over(with_sync_spent(budget), 80.0)
    assert with_sync_spent(with_sync_spent(budget)).remaining == 0


def test_an_unlimited_period_never_ends() -> None:
    budget = with_sync_spent(new_period(BudgetSpec(), now_s=0.0))
    assert (budget.remaining, is_over(budget, 1e12)) == (None, False)
