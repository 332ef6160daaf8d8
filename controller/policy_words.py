"""Policies as one writes them in an option: ``NAME`` or ``NAME:PARAM=VALUE:PARAM=VALUE``; those that run in shadow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from controller.policy import PolicyContext, make_policy
from controller.policy.base import Policy
from controller.schema import PolicySpec
from service.errors import InputError

MAX_SHADOWS = 8
OPTIONS = {
    "name": "policy",
    "params": "policy_params",
    "outer_syncs": "budget_syncs",
    "horizon_s": "budget_horizon_s",
    "syncs_per_hour": "budget_syncs_per_hour",
    "max_defer_s": "budget_max_defer_s",
}
"""Fields of a policy and of a budget, as a request has them, and what the settings call them."""
REMEDY = "write NAME or NAME:PARAM=VALUE, for example fixed_h:h=256"


def parse_policy(text: str, *, field: str) -> PolicySpec:
    """The policy that ``text`` names; whether it exists is for `make_policy` to say.

    Raises:
        InputError: it is not in this form.
    """
    name, *pairs = text.strip().split(":")
    if not name:
        raise InputError("a policy without a name", field=field, remedy=REMEDY)
    params: dict[str, float | int] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in params:
            raise InputError(f"{pair!r} of {text!r} is not PARAM=VALUE, once", field=field, remedy=REMEDY)
        params[key] = _number(value, text, field)
    return PolicySpec(name=name, params=params)


def _number(value: str, text: str, field: str) -> float | int:
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError as exc:
        raise InputError(f"{value!r} of {text!r} is not a number", field=field, remedy=REMEDY) from exc


def check_shadows(specs: Sequence[PolicySpec], context: PolicyContext) -> list[Policy]:
    """The policies to run in shadow.

    Raises:
        InputError: too many of them, twice the same, or one that there is not.
    """
    labels = [spec.label for spec in specs]
    if len(labels) > MAX_SHADOWS:
        raise InputError(f"{len(labels)} policies are too many", field="policies", remedy=f"name at most {MAX_SHADOWS}")
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise InputError(f"{twice[0]} is named twice", field="policies", remedy="drop one, or vary a parameter")
    return [_make(spec, context, field=f"policies.{index}") for index, spec in enumerate(specs)]


def _make(spec: PolicySpec, context: PolicyContext, *, field: str) -> Policy:
    try:
        return make_policy(spec, context)
    except InputError as exc:
        raise InputError(exc.message, field=f"{field}.{exc.field}", remedy=exc.remedy) from exc


def in_options(exc: InputError) -> InputError:
    """An error about a policy or a budget in the words of the settings."""
    first, dot, rest = (exc.field or "").partition(".")
    if first == "policies":
        _, _, part = rest.partition(".")
        message = f"{part}: {exc.message}" if part else exc.message
        return InputError(message, field="shadow_policies", remedy=exc.remedy)
    words = re.compile(r"\b(" + "|".join(name for name in OPTIONS if name not in {"name", "params"}) + r")\b")
    texts = [text and words.sub(lambda found: OPTIONS[found[0]], text) for text in (exc.message, exc.remedy)]
    return InputError(texts[0] or "", field=OPTIONS.get(first, first) + dot + rest, remedy=texts[1])
