"""Switchback experiment: two policies take turns in blocks of time on one fleet (pure).

    block   |- washout -|------------- counts -------------|
    syncs        0          at most ``syncs_per_block``

Blocks go in pairs, one of each arm, in random order from a seed: what changes over the day hits both alike. Each arm
has the same budget in each block, and none in the washout, in which the block before still has its effect.

The unit is the pair: difference of the violation rates (violations / requests, after the washout) of its two blocks.
Tested by `service.statistics`: sign flips over pairs, bootstrap interval. A pair one of whose blocks was disturbed is
left out. Arms that spent a different number of syncs are told apart from arms that timed them differently.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from controller.budget import check_budget
from controller.lab_schema import Arm, Block, ExperimentResult, ExperimentSpec, ExperimentVerdict
from controller.policy import PolicyContext, make_policy
from controller.policy.base import FleetView, summarize
from controller.policy.guard import SAFETY
from controller.schema import BudgetSpec, PolicySpec
from service.errors import InputError
from service.statistics import bootstrap_ci95, sign_flip_p_value

SIGNIFICANT_P = 0.05
MIN_PAIRS = 6
"""Of five pairs that all agree p is 0.06."""
UNEQUAL_SYNCS_FRAC = 0.1
"""Difference of the mean number of syncs per block, over the larger mean."""
DRAWING_POLICY = "random_deferral"
NO_SYNC = "no_sync"


def check_experiment(spec: ExperimentSpec, context: PolicyContext) -> None:
    """Refuse an experiment that contradicts itself.

    Raises:
        InputError: naming the field and the remedy.
    """
    for arm in Arm:
        _check_policy(arm, policy_of(spec, arm, pair=0), context)
    if spec.a == spec.b:
        raise InputError("is the same policy as a", field="b", remedy="name another policy, or another parameter")
    if spec.blocks % 2:
        raise InputError(
            f"{spec.blocks} blocks do not go in pairs", field="blocks", remedy=f"take {spec.blocks + 1} blocks"
        )
    if spec.washout_s >= spec.block_s:
        raise InputError(
            f"{spec.washout_s:g} s leave nothing of a block of {spec.block_s:g} s",
            field="washout_s",
            remedy="shorten the washout, or lengthen block_s",
        )
    try:
        check_budget(budget_of(spec))
    except InputError as exc:
        raise InputError(
            f"{exc.message}: that is what the washout leaves of a block",
            field="syncs_per_block",
            remedy="lengthen block_s, shorten min_gap_s or washout_s, or lower syncs_per_block",
        ) from exc


def _check_policy(arm: Arm, spec: PolicySpec, context: PolicyContext) -> None:
    try:
        make_policy(spec, context)
    except InputError as exc:
        raise InputError(exc.message, field=f"{arm}.{exc.field}", remedy=exc.remedy) from exc


def check_time_for_syncs(spec: ExperimentSpec, view: FleetView, now_s: float, *, pace_s: float | None = None) -> None:
    """Refuse a budget that the islands cannot spend at the pace that they have now.

    ``pace_s`` is the seconds per inner step of the slowest as they went by, waits at the gate included.

    Raises:
        InputError: naming the field and the remedy.
    """
    step_time_s = max(summarize(view, now_s).step_time_s, pace_s or 0.0)
    needed_s = spec.syncs_per_block * SAFETY * (view.expected_sync_s + view.min_h * step_time_s)
    counts_s = spec.block_s - spec.washout_s
    if step_time_s > 0 and needed_s > counts_s:
        raise InputError(
            f"{spec.syncs_per_block} syncs take some {needed_s:.0f} s at {step_time_s:.3g} s per inner step,"
            f" but a block counts for {counts_s:g} s",
            field="syncs_per_block",
            remedy="lower it, lengthen block_s, or lower the controller's min_h",
        )


def block_order(blocks: int, seed: int) -> tuple[Arm, ...]:
    """Which arm each block belongs to."""
    rng = random.Random(f"switchback/{seed}")
    order: list[Arm] = []
    for _ in range(blocks // 2):
        order += (Arm.A, Arm.B) if rng.random() < 0.5 else (Arm.B, Arm.A)
    return tuple(order)


def policy_of(spec: ExperimentSpec, arm: Arm, *, pair: int) -> PolicySpec:
    """The policy of one block. Random deferral draws anew in each pair: one draw repeated would be one schedule."""
    policy = spec.a if arm is Arm.A else spec.b
    if policy.name != DRAWING_POLICY or "draw" in policy.params:
        return policy
    return PolicySpec(name=policy.name, params={**policy.params, "draw": pair})


def budget_of(spec: ExperimentSpec) -> BudgetSpec:
    """What each block may spend once its washout is over."""
    return BudgetSpec(
        outer_syncs=spec.syncs_per_block, horizon_s=spec.block_s - spec.washout_s, min_gap_s=spec.min_gap_s
    )


def washout_budget(spec: ExperimentSpec) -> BudgetSpec:
    return BudgetSpec(outer_syncs=0, min_gap_s=spec.min_gap_s)


def has_equal_syncs(spec: ExperimentSpec) -> bool:
    """Whether both arms mean to spend their budget: against `no_sync` one asks what syncs cost at all."""
    return NO_SYNC not in {spec.a.name, spec.b.name}


def result_of(blocks: Sequence[Block], *, num_over: int, equal_syncs: bool = True) -> ExperimentResult:
    """The result of the first ``num_over`` blocks, which are over; ``equal_syncs`` is whether arms must be matched."""
    over = list(zip(blocks[:num_over:2], blocks[1:num_over:2], strict=False))
    pairs = [_by_arm(pair) for pair in over if all(_counts(block) for block in pair)]
    if not pairs:
        return ExperimentResult(pairs=0, pairs_left_out=len(over), verdict=ExperimentVerdict.TOO_FEW_PAIRS)
    differences = [_rate(a) - _rate(b) for a, b in pairs]
    p_value = sign_flip_p_value(differences) if len(pairs) > 1 else None
    syncs_a, syncs_b = (statistics.fmean(pair[at].syncs for pair in pairs) for at in (0, 1))
    mean_diff = statistics.fmean(differences)
    return ExperimentResult(
        pairs=len(pairs),
        pairs_left_out=len(over) - len(pairs),
        verdict=_verdict(len(pairs), mean_diff, p_value, matched=not equal_syncs or _are_equal(syncs_a, syncs_b)),
        rate_a=statistics.fmean(_rate(a) for a, _ in pairs),
        rate_b=statistics.fmean(_rate(b) for _, b in pairs),
        mean_diff=mean_diff,
        ci95=bootstrap_ci95(differences) if len(pairs) > 1 else None,
        p_value=p_value,
        syncs_a=syncs_a,
        syncs_b=syncs_b,
        excess_a=_mean(lambda pair: pair[0].sync_excess, pairs),
        excess_b=_mean(lambda pair: pair[1].sync_excess, pairs),
    )


def _verdict(num_pairs: int, mean_diff: float, p_value: float | None, *, matched: bool) -> ExperimentVerdict:
    if num_pairs < MIN_PAIRS or p_value is None:
        return ExperimentVerdict.TOO_FEW_PAIRS
    if not matched:
        return ExperimentVerdict.UNEQUAL_SYNCS
    if p_value >= SIGNIFICANT_P:
        return ExperimentVerdict.NO_DIFFERENCE
    return ExperimentVerdict.A_BETTER if mean_diff < 0 else ExperimentVerdict.B_BETTER


def _are_equal(syncs_a: float, syncs_b: float) -> bool:
    return abs(syncs_a - syncs_b) <= UNEQUAL_SYNCS_FRAC * max(syncs_a, syncs_b)


def _by_arm(pair: tuple[Block, Block]) -> tuple[Block, Block]:
    first, second = pair
    return (first, second) if first.arm is Arm.A else (second, first)


def _counts(block: Block) -> bool:
    return block.disturbance is None and block.rate is not None


def _rate(block: Block) -> float:
    assert block.rate is not None
    return block.rate


def _mean(value: Callable[[tuple[Block, Block]], float | None], pairs: Sequence[tuple[Block, Block]]) -> float | None:
    known = [found for pair in pairs if (found := value(pair)) is not None]
    return statistics.fmean(known) if known else None
