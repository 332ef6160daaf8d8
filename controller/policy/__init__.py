"""Sync policies by name. Adding one takes a file with its parameters and its rule, and an entry in `BUILDERS`.

Other packages add theirs by an entry point (`controller.policy.plugins`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from controller.policy.adaptive_tokens import AdaptiveTokens, AdaptiveTokensParams
from controller.policy.base import Policy
from controller.policy.fixed_h import DEFAULT_H, FixedH, FixedHParams
from controller.policy.no_sync import NoSync, NoSyncParams
from controller.policy.plugins import build_installed, installed
from controller.policy.pressure_gate import PressureGate, PressureGateParams
from controller.policy.random_deferral import RandomDeferral, RandomDeferralParams
from controller.policy.rule import GuardedPolicy
from controller.policy.wa_calibrated import WaCalibrated, WaCalibratedParams
from controller.policy.wa_diloco import WaDiloco, WaDilocoParams
from controller.policy.wa_forecast import WaForecast, WaForecastParams
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
                field=f"params.{name}",
                remedy="choose a number of ordinary size",
            )
    build = BUILDERS.get(spec.name)
    if build is not None:
        return build(spec, context)
    others = installed()
    if spec.name not in others:
        known = ", ".join([*BUILDERS, *(name for name in sorted(others) if name not in BUILDERS)])
        raise InputError(f"no such policy: {spec.name}", field="name", remedy=f"known: {known}")
    return build_installed(others[spec.name], lambda builder: builder(spec, context))


def _no_sync(spec: PolicySpec, context: PolicyContext) -> Policy:
    parse_params(NoSyncParams, spec)
    return NoSync()


def _fixed_h(spec: PolicySpec, context: PolicyContext) -> Policy:
    params = parse_params(FixedHParams, spec)
    h = params.h if params.h is not None else min(max(DEFAULT_H, context.min_h), context.max_h)
    if not context.min_h <= h <= context.max_h:
        limits = f"[{context.min_h}, {context.max_h}]"
        raise InputError(
            f"{h} is outside of {limits}", field="params.h", remedy="choose h from min_h to max_h, or move them"
        )
    return GuardedPolicy(spec.name, FixedH(h))


def _pressure_gate(spec: PolicySpec, context: PolicyContext) -> Policy:
    return GuardedPolicy(spec.name, PressureGate(parse_params(PressureGateParams, spec).threshold))


def _random_deferral(spec: PolicySpec, context: PolicyContext) -> Policy:
    params = parse_params(RandomDeferralParams, spec)
    seed = params.seed if params.seed is not None else context.seed
    return GuardedPolicy(spec.name, RandomDeferral(seed=seed, draw=params.draw))


def _wa_diloco(spec: PolicySpec, context: PolicyContext) -> Policy:
    return GuardedPolicy(spec.name, WaDiloco(parse_params(WaDilocoParams, spec)))


def _adaptive_tokens(spec: PolicySpec, context: PolicyContext) -> Policy:
    return GuardedPolicy(spec.name, AdaptiveTokens(parse_params(AdaptiveTokensParams, spec).scale))


def _wa_calibrated(spec: PolicySpec, context: PolicyContext) -> Policy:
    return GuardedPolicy(spec.name, WaCalibrated(parse_params(WaCalibratedParams, spec)))


def _wa_forecast(spec: PolicySpec, context: PolicyContext) -> Policy:
    params = parse_params(WaForecastParams, spec)
    return GuardedPolicy(spec.name, WaForecast(params, params.seed if params.seed is not None else context.seed))


BUILDERS: dict[str, Callable[[PolicySpec, PolicyContext], Policy]] = {
    "no_sync": _no_sync,
    "fixed_h": _fixed_h,
    "adaptive_tokens": _adaptive_tokens,
    "pressure_gate": _pressure_gate,
    "random_deferral": _random_deferral,
    "wa_diloco": _wa_diloco,
    "wa_calibrated": _wa_calibrated,
    "wa_forecast": _wa_forecast,
}


def parse_params(model: type[P], spec: PolicySpec) -> P:
    try:
        return model.model_validate(spec.params)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        known = ", ".join(model.model_fields) or "none"
        message = "no such parameter" if first["type"] == "extra_forbidden" else str(first["msg"])
        raise InputError(message, field=f"params.{name}", remedy=f"{spec.name} takes: {known}") from exc
