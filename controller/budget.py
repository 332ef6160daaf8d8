"""The sync budget: how many outer syncs may be spent until a horizon ends, or per hour, and how far apart.

A period starts when it is set. After its horizon nothing is spent any more until a new one is set. Every outer step
since then costs one sync, told by a report or by the version of the global parameters alone (`controller.rounds`); a
round that failed altogether costs nothing. Rounds that islands began by themselves may take more than the budget has.
"""

from __future__ import annotations

from controller.policy.base import BudgetView
from controller.schema import BudgetSpec, BudgetStatus
from service.errors import InputError


def check_budget(spec: BudgetSpec) -> None:
    """Refuse a budget that contradicts itself.

    Raises:
        InputError: naming the field of the spec and the remedy.
    """
    _check_rate(spec)
    _check_deferral(spec)
    if spec.horizon_s is None:
        return
    if spec.outer_syncs is None:
        raise InputError(
            "a horizon limits nothing without a number of syncs",
            field="outer_syncs",
            remedy="set outer_syncs too, or leave horizon_s out",
        )
    least_s = (spec.outer_syncs - 1) * spec.min_gap_s
    if least_s >= spec.horizon_s:
        raise InputError(
            f"{spec.outer_syncs} syncs at least {spec.min_gap_s:g} s apart take {least_s:g} s,"
            f" but the horizon is {spec.horizon_s:g} s",
            field="horizon_s",
            remedy="lengthen horizon_s, shorten min_gap_s, or lower outer_syncs",
        )


def _check_rate(spec: BudgetSpec) -> None:
    if spec.period_s is None:
        return
    if spec.outer_syncs is not None or spec.horizon_s is not None:
        raise InputError(
            "a rate has no number and no horizon",
            field="syncs_per_hour",
            remedy="set either the rate, or outer_syncs with horizon_s",
        )
    if spec.min_gap_s > spec.period_s:
        raise InputError(
            f"{spec.syncs_per_hour:g} syncs per hour come every {spec.period_s:g} s,"
            f" but min_gap_s is {spec.min_gap_s:g} s",
            field="syncs_per_hour",
            remedy="lower syncs_per_hour or shorten min_gap_s",
        )


def _check_deferral(spec: BudgetSpec) -> None:
    """A longest wait that the number, the rate or the gap do not leave room for would be broken, or break them."""
    if spec.max_defer_s is None:
        return
    least_s, what = spec.min_gap_s, f"min_gap_s {spec.min_gap_s:g} s"
    if spec.period_s is not None:
        least_s, what = spec.period_s, f"{spec.syncs_per_hour:g} syncs per hour"
    elif spec.outer_syncs is not None and spec.horizon_s is not None:
        least_s = max(least_s, spec.horizon_s / (spec.outer_syncs + 1))
        what = f"{spec.outer_syncs} syncs in {spec.horizon_s:g} s, at least {spec.min_gap_s:g} s apart"
    if spec.max_defer_s < least_s:
        raise InputError(
            f"{what} cannot come within {spec.max_defer_s:g} s of each other",
            field="max_defer_s",
            remedy=f"raise it to {least_s:g} s or more, or change the rest of the budget",
        )


def new_period(spec: BudgetSpec, *, now_s: float, last_sync_s: float | None = None) -> BudgetStatus:
    """A fresh period; the gap to the last sync still holds."""
    return BudgetStatus(spec=spec, started_s=now_s, spent=0, remaining=spec.outer_syncs, last_sync_s=last_sync_s)


def with_sync_started(budget: BudgetStatus, started_s: float) -> BudgetStatus:
    last_s = started_s if budget.last_sync_s is None else max(started_s, budget.last_sync_s)
    return budget.model_copy(update={"last_sync_s": last_s})


def with_sync_spent(budget: BudgetStatus) -> BudgetStatus:
    spent = budget.spent + 1
    total = budget.spec.outer_syncs
    return budget.model_copy(update={"spent": spent, "remaining": None if total is None else max(0, total - spent)})


def is_over(budget: BudgetStatus, now_s: float) -> bool:
    """Whether nothing may be spent any more."""
    horizon_s = budget.spec.horizon_s
    return budget.remaining == 0 or (horizon_s is not None and now_s >= budget.started_s + horizon_s)


def view_budget(budget: BudgetStatus) -> BudgetView:
    return BudgetView(
        outer_syncs=budget.spec.outer_syncs,
        horizon_s=budget.spec.horizon_s,
        min_gap_s=budget.spec.min_gap_s,
        syncs_per_hour=budget.spec.syncs_per_hour,
        max_defer_s=budget.spec.max_defer_s,
        started_s=budget.started_s,
        spent=budget.spent,
        last_sync_s=budget.last_sync_s,
    )
