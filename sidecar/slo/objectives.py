"""What is asked for: bounds on latencies that a request must meet together, and the share of requests that must.

    slo        = objective {"," objective} ["@" target]        ttft:200ms,itl:50ms,e2e:2s@99%
    objective  = ("ttft" | "itl" | "tpot" | "e2e") ":" number ("ms" | "s")
    target     = number "%"                                    99 % when left out

A request that misses one of the objectives violates the SLO. Goodput is what meets all of them (DistServe, Zhong et
al. 2024).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from service.errors import InputError

EXAMPLES = "write metric:threshold, such as e2e:200ms or ttft:200ms,itl:50ms,e2e:2s@99%"
OBJECTIVE = re.compile(r"(?P<metric>[a-z0-9]+):(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<unit>[a-zµ]*)", re.ASCII)
TARGET = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)%", re.ASCII)
UNITS_S = {"ms": 1e-3, "s": 1.0}
MIN_THRESHOLD_S = 1e-6
MAX_THRESHOLD_S = 86_400.0
DEFAULT_TARGET_FRAC = 0.99


class SloMetric(StrEnum):
    """Latency that an objective is about; also the name of its histogram in a snapshot."""

    TTFT = "ttft"
    """Time to first token."""
    ITL = "itl"
    """Gap between tokens. Its own account counts tokens; a request is judged by its mean gap, which is its TPOT."""
    TPOT = "tpot"
    """Mean time per output token after the first, over one request."""
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class Objective:
    """The latency is at most the threshold."""

    metric: SloMetric
    threshold_s: float

    def __str__(self) -> str:
        return f"{self.metric}:{self.threshold_s * 1e3:.10g}ms"


@dataclass(frozen=True)
class Slo:
    """Objectives that a request meets together, one per metric, and the share of requests that must."""

    objectives: tuple[Objective, ...]
    target_frac: float = DEFAULT_TARGET_FRAC
    """Above 0 and below 1: what it leaves is the error budget."""

    def __str__(self) -> str:
        return f"{','.join(map(str, self.objectives))}@{self.target_frac * 100:.10g}%"

    @property
    def budget_frac(self) -> float:
        """Share of requests that may violate."""
        return 1.0 - self.target_frac

    def threshold_s(self, metric: SloMetric) -> float:
        """The bound on one metric; infinite where none is set."""
        return next((o.threshold_s for o in self.objectives if o.metric is metric), math.inf)

    @cached_property
    def request_limits_s(self) -> tuple[float, float, float]:
        """Bounds on the TTFT, TPOT and e2e of one request; infinite where none is set."""
        tpot_s = min(self.threshold_s(SloMetric.ITL), self.threshold_s(SloMetric.TPOT))
        return self.threshold_s(SloMetric.TTFT), tpot_s, self.threshold_s(SloMetric.E2E)

    @property
    def main(self) -> Objective:
        """The objective to show where there is room for one: e2e, or else the first."""
        return next((o for o in self.objectives if o.metric is SloMetric.E2E), self.objectives[0])


def parse_slo(text: str) -> Slo:
    """The SLO that ``text`` states.

    Raises:
        InputError: unknown or repeated metric, missing unit, a threshold that is not between a microsecond and a day,
            or a target that is not between 0 and 100 %.
    """
    listed, at, target = text.strip().lower().partition("@")
    objectives = tuple(_parse_objective(part.strip()) for part in listed.split(","))
    metrics = [objective.metric for objective in objectives]
    repeated = next((metric for metric in SloMetric if metrics.count(metric) > 1), None)
    if repeated is not None:
        raise _refusal(f"metric {repeated} is there twice", remedy="give each metric one threshold")
    return Slo(objectives, _parse_target(target.strip()) if at else DEFAULT_TARGET_FRAC)


def _parse_objective(text: str) -> Objective:
    match = OBJECTIVE.fullmatch(text)
    if match is None:
        raise _refusal(f"{text!r} is not an objective")
    if match["metric"] not in set(SloMetric):
        raise _refusal(f"metric {match['metric']!r} is not one of {', '.join(SloMetric)}")
    if match["unit"] not in UNITS_S:
        given = repr(match["unit"]) if match["unit"] else "missing"
        raise _refusal(f"the threshold's unit is {given}, not ms or s")
    threshold_s = float(match["number"]) * UNITS_S[match["unit"]]
    if not MIN_THRESHOLD_S <= threshold_s <= MAX_THRESHOLD_S:
        raise _refusal(f"threshold {threshold_s:g} s is not between a microsecond and a day")
    return Objective(SloMetric(match["metric"]), threshold_s)


def _parse_target(text: str) -> float:
    match = TARGET.fullmatch(text)
    if match is None:
        raise _refusal(f"target {text!r} is not a percentage", remedy="write it with its sign, such as @99%")
    target_frac = float(match["number"]) / 100.0
    if not 0.0 < target_frac < 1.0:
        raise _refusal(
            f"target {text} leaves {'no' if target_frac >= 1.0 else 'nothing but'} error budget",
            remedy="write more than 0% and less than 100%, such as @99.9%",
        )
    return target_frac


def _refusal(message: str, *, remedy: str = EXAMPLES) -> InputError:
    return InputError(message, field="slo", remedy=remedy)
