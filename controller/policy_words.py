"""Policies as one writes them in an option: ``NAME`` or ``NAME:PARAM=VALUE:PARAM=VALUE``; those that run in shadow."""

from __future__ import annotations

from collections.abc import Sequence

from controller.policy import PolicyContext, make_policy
from controller.policy.base import Policy
from controller.schema import PolicySpec
from service.errors import InputError

MAX_SHADOWS = 8
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
        raise InputError(
            f"{len(labels)} policies are too many", field="shadow_policies", remedy=f"name at most {MAX_SHADOWS}"
        )
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise InputError(f"{twice[0]} is named twice", field="shadow_policies", remedy="drop one, or vary a parameter")
    try:
        return [make_policy(spec, context) for spec in specs]
    except InputError as exc:
        raise InputError(f"{exc.field}: {exc.message}", field="shadow_policies", remedy=exc.remedy) from exc
