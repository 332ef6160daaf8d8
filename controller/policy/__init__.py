"""Sync policies by name. Adding one takes a file with its parameters and its rule, and an entry in `BUILDERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from controller.policy.base import Policy
from controller.policy.fixed_h import DEFAULT_H, FixedH, FixedHParams
from controller.policy.no_sync import NoSync, NoSyncParams
from controller.policy.pressure_gate import PressureGate, PressureGateParams
from controller.policy.random_deferral import RandomDeferral, RandomDeferralParams
from controller.policy.rule import GuardedPolicy
from controller.policy.wa_diloco import WaDiloco, WaDilocoParams
from controller.schema import PolicySpec
from service.errors import InputError

MAX_PARAM = 1e18
"""Far beyond any useful parameter, far below what would overflow a term."""

P = TypeVar("P", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What the run fixes for whichever policy is in force."""

    min_h: int
    max_h: int
    seed: int


def make_policy(spec: PolicySpec, context: PolicyContext) -> Policy:
    """The policy that ``spec`` names.

    Raises:
        InputError: no such policy, or a parameter that it does not know or that cannot work.
    """
    for name, value in spec.params.items():
        # Written so that NaN is refused, and an integer of any size.
        if not -MAX_PARAM <= value <= MAX_PARAM:
            raise InputError(
                f"must be a number from {-MAX_PARAM:g} to {MAX_PARAM:g}",
                field=f"policy_params.{name}",
                remedy="choose a number of ordinary size",
            )
    build = BUILDERS.get(spec.name)
    if build is None:
        raise InputError(f"no such policy: {spec.name}", field="policy", remedy=f"known: {', '.join(BUILDERS)}")
    return build(spec, context)


def _no_sync(spec: PolicySpec, context: PolicyContext) -> Policy:
    _parse(NoSyncParams, spec)
    return NoSync()


def _fixed_h(spec: PolicySpec, context: PolicyContext) -> Policy:
    params = _parse(FixedHParams, spec)
    h = params.h if params.h is not None else min(max(DEFAULT_H, context.min_h), context.max_h)
    if not context.min_h <= h <= context.max_h:
        limits = f"[{context.min_h}, {context.max_h}]"
        raise InputError(
            f"{h} is outside of {limits}", field="policy_params.h", remedy="choose h from min_h to max_h, or move them"
        )
    return GuardedPolicy(spec.name, FixedH(h))


def _pressure_gate(spec: PolicySpec, context: PolicyContext) -> Policy:
    return GuardedPolicy(spec.name, PressureGate(_parse(PressureGateParams, spec).threshold))


def _random_deferral(spec: PolicySpec, context: PolicyContext) -> Policy:
    params = _parse(RandomDeferralParams, spec)
    seed = params.seed if params.seed is not None else context.seed
    return GuardedPolicy(spec.name, RandomDeferral(seed=seed, draw=params.draw))


def _wa_diloco(spec: PolicySpec, context: PolicyContext) -> Policy:
    return GuardedPolicy(spec.name, WaDiloco(_parse(WaDilocoParams, spec)))


BUILDERS: dict[str, Callable[[PolicySpec, PolicyContext], Policy]] = {
    "no_sync": _no_sync,
    "fixed_h": _fixed_h,
    "pressure_gate": _pressure_gate,
    "random_deferral": _random_deferral,
    "wa_diloco": _wa_diloco,
}


def _parse(model: type[P], spec: PolicySpec) -> P:
    try:
        return model.model_validate(spec.params)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        known = ", ".join(model.model_fields) or "none"
        message = "no such parameter" if first["type"] == "extra_forbidden" else str(first["msg"])
        raise InputError(message, field=f"policy_params.{name}", remedy=f"{spec.name} takes: {known}") from exc
