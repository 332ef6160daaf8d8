"""Policies that other packages bring along, found by their metadata.

A distribution declares them in its ``pyproject.toml``:

    [project.entry-points."wadiloco.policies"]
    at_night = "my_package.at_night:build"

``build(spec, context)`` returns a `controller.policy.base.Policy`, mostly a `GuardedPolicy` around a rule of its own.
Nothing of it is imported until somebody asks for ``at_night``. The built-in names cannot be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from controller.policy.base import Policy
from service.errors import InputError, WadilocoError

GROUP = "wadiloco.policies"
PARTS = ("name", "syncs", "decide")
"""What a policy must have."""


def installed() -> dict[str, EntryPoint]:
    """Name → where it is. Of two distributions that bring the same name the first on the path counts."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point)
    return found


def build_installed(point: EntryPoint, build_with: Callable[[Any], Any]) -> Policy:
    """The policy of an entry point; ``build_with`` calls its builder.

    Raises:
        InputError: it cannot be imported, its builder failed, or what it returned is no policy.
    """
    try:
        policy = build_with(point.load())
    except WadilocoError:
        raise
    except (Exception, SystemExit) as exc:  # Foreign code: whatever it raises must not end the controller.
        raise _broken(point, f"{type(exc).__name__}: {exc}") from exc
    missing = [part for part in PARTS if not hasattr(policy, part)]
    if missing:
        raise _broken(point, f"{point.value} returned {type(policy).__name__}, which has no {', '.join(missing)}")
    if policy.name != point.name:
        raise _broken(point, f"the policy calls itself {policy.name!r}")
    built: Policy = policy
    return built


def _broken(point: EntryPoint, why: str) -> InputError:
    package = point.dist.name if point.dist is not None else point.module
    return InputError(
        f"{point.name} of {package} cannot be used: {why}",
        field="name",
        remedy=f"repair or remove {package}, or choose another policy",
    )
