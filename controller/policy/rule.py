"""A policy is a rule behind the guard: the rule always computes its terms, the guard may overrule its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.policy.base import Decision, FleetView, Group, summarize
from controller.policy.guard import budget_due_s, guard
from controller.schema import Action, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What a rule would do, were it free."""

    sync: bool
    reason: Reason
    terms: Mapping[str, float]


class Rule(Protocol):
    def judge(self, view: FleetView, group: Group, now_s: float) -> Opinion: ...


@dataclass(frozen=True, slots=True)
class GuardedPolicy:
    """The rule ``rule`` under the common limits."""

    name: str
    rule: Rule
    syncs: bool = True

    def decide(self, view: FleetView, now_s: float) -> Decision:
        group = summarize(view, now_s)
        opinion = self.rule.judge(view, group, now_s)
        action, reason = guard(view, group, now_s) or (
            Action.SYNC if opinion.sync else Action.DEFER,
            opinion.reason,
        )
        return Decision(action=action, reason=reason, terms=common_terms(view, group, now_s) | dict(opinion.terms))


def common_terms(view: FleetView, group: Group, now_s: float) -> dict[str, float]:
    """The group view and the state of the budget, as every decision carries them."""
    terms = group.terms()
    if view.budget.remaining is not None:
        terms["budget_remaining"] = float(view.budget.remaining)
    due_s = budget_due_s(view, group)
    if due_s is not None:
        terms["budget_due_in_s"] = due_s - now_s
    return terms


def fall_back(view: FleetView, now_s: float) -> Decision:
    """The safe answer in place of a policy that raised: the guard's, else wait until ``max_h``."""
    group = summarize(view, now_s)
    action, reason = guard(view, group, now_s) or (Action.DEFER, Reason.POLICY_FAILED)
    return Decision(action=action, reason=reason, terms=common_terms(view, group, now_s))
