"""Wire contract of the controller's experiments: headroom, policies in shadow, switchback.

Wall-clock times are Unix seconds.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, computed_field

from controller.schema import MAX_BUDGET_S, Action, PolicySpec, Reason
from service.wire import Order, Wire


class HeadroomVerdict(StrEnum):
    """Whether timing syncs can save anything here. Exported as a metric label."""

    ENOUGH = "enough"
    """The best schedule costs clearly less than random ones, and the load can be told a moment ahead."""
    UNPREDICTABLE = "unpredictable"
    """It costs less, but only in hindsight: what a second cost says nothing about a sync that starts after it."""
    NOTHING_TO_GAIN = "nothing_to_gain"
    """What the best schedule saves is within the noise of random ones, or under a twentieth of what they cost."""
    TOO_LITTLE_DATA = "too_little_data"
    """Too few seconds of the window whose sync cost is known."""
    NO_BUDGET = "no_budget"
    """No budget with a number and a horizon or a rate, and no sync in the window: nobody can say how many to place."""


class PolicyHeadroom(Wire):
    """One policy over its part of the window. Costs are expected SLO violations that its syncs added."""

    policy: str
    shadow: bool
    since_s: float
    """Start of its part of the window: it was set, or began to run in shadow."""
    syncs: int
    """That it started there, and that are over; in per_island mode every island that came counts."""
    priced_syncs: int
    """Of these, the ones whose cost is known; all figures below are of these, and of as many random or best ones."""
    cost: float | None
    random_cost: float | None
    oracle_cost: float | None
    share_closed: float | None
    """(random - own) / (random - oracle); None where the gap is within the noise."""
    as_cheap_frac: float | None
    """Share of the random schedules that cost as little or less: small is better than chance."""


class Headroom(Wire):
    """``GET /v1/headroom?window_s=``: what timing syncs could save. Costs are expected SLO violations in the window."""

    t_s: float
    window_s: float
    """What was looked at: from the first second that is known, and no more than holds sixty syncs."""
    covered_s: float
    """Seconds of the window whose sync cost is known."""
    verdict: HeadroomVerdict
    syncs: int | None
    """How many are placed: the budget's rate times the window; without one, as many as the policy in force did."""
    min_gap_s: float
    """Between two starts: the budget's, and never less than a sync takes."""
    sync_s: float
    """How long one takes, as observed lately."""
    random_cost: float | None = None
    """Mean of random schedules."""
    random_sd: float | None = None
    """Spread of one of them."""
    oracle_cost: float | None = None
    """The cheapest schedule, known in hindsight."""
    gap: float | None = None
    """random_cost - oracle_cost."""
    predictability: float | None = None
    """Correlation of a second's cost with that of a sync that starts after it: 0 is unpredictable."""
    islands: int | None = None
    """In per_island mode, how many islands were judged, each by its own servers and moments, and added up; of many it
    is an even sample. None in synchronous mode: the fleet was judged as one."""
    policies: tuple[PolicyHeadroom, ...] = ()
    """The one in force first, then those in shadow."""


class ShadowOrder(Order):
    """``PUT /v1/shadow``: the policies that run beside the one in force, instead of those that did."""

    policies: tuple[PolicySpec, ...] = Field(max_length=8)


class ShadowStatus(Wire):
    """One policy in shadow, with its own count of syncs and steps: nothing of it is enforced."""

    policy: str
    """Name and parameters, as its decisions are journalled under."""
    spec: PolicySpec
    since_s: float
    syncs: int
    """That it would have started: in per_island mode, rounds that an island of it would have opened."""
    island_syncs: int | None = None
    """In per_island mode, how often islands would have come to one of these; None in synchronous mode."""
    last_sync_s: float | None
    budget_remaining: int | None
    action: Action | None = None
    """Of its last decision, in per_island mode about most islands; None before the first."""
    reason: Reason | None = None
    failures: int = 0
    resting_until_s: float | None = None
    """After it raised: it is not asked before this Unix time."""


class ShadowPage(Wire):
    """``GET /v1/shadow``."""

    policies: tuple[ShadowStatus, ...]


class Arm(StrEnum):
    A = "a"
    B = "b"


class ExperimentSpec(Order):
    """``POST /v1/experiments``: two policies in turns, with equal budgets in blocks of equal length."""

    a: PolicySpec
    b: PolicySpec
    blocks: int = Field(default=16, ge=2, le=400)
    """Even: they go in pairs, each in random order."""
    block_s: float = Field(default=600.0, ge=1, le=7 * 86400)
    washout_s: float = Field(default=60.0, ge=0)
    """At the start of each block: no sync, and nothing counts. As long as the longest request."""
    syncs_per_block: int = Field(default=1, ge=1, le=10_000)
    min_gap_s: float = Field(default=0.0, ge=0, le=MAX_BUDGET_S)
    seed: int = Field(default=0, ge=0, lt=1 << 63)


class ExperimentState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """By an operator, or because its policies became impossible."""


class Disturbance(StrEnum):
    """Why a block does not count."""

    PAUSED = "paused"
    """The run was paused in it."""
    STOPPED = "stopped"
    """The experiment ended in it."""


class Block(Wire):
    """One block, and what was seen in it after its washout."""

    index: int
    arm: Arm
    started_s: float
    counts_from_s: float
    ends_s: float
    seen_s: float
    """When the controller last looked after it."""
    attempt: int = 1
    """Above 1: the controller was away for too long, and the block began again."""
    requests: float = 0.0
    violations: float = 0.0
    """Of ``requests``, those that certainly violated the SLO."""
    requests_in_sync: float = 0.0
    violations_in_sync: float = 0.0
    syncs: int = 0
    disturbance: Disturbance | None = None
    """None for one that counts, unless it is over without requests."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def rate(self) -> float | None:
        """Violations per request; None without requests."""
        return self.violations / self.requests if self.requests > 0 else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def sync_excess(self) -> float | None:
        """Violations while syncs ran, over what the other requests of the block make one expect."""
        others = self.requests - self.requests_in_sync
        if others <= 0:
            return None
        return self.violations_in_sync - (self.violations - self.violations_in_sync) / others * self.requests_in_sync


class ExperimentVerdict(StrEnum):
    A_BETTER = "a_better"
    B_BETTER = "b_better"
    NO_DIFFERENCE = "no_difference"
    """None that these blocks could show: p is 0.05 or more."""
    TOO_FEW_PAIRS = "too_few_pairs"
    """Even if every pair agreed, p could not fall below 0.05: six are the least."""
    UNEQUAL_SYNCS = "unequal_syncs"
    """The arms did not spend the same number of syncs, so that the difference may be due to that (against `no_sync` it
    is meant to be)."""


class ExperimentResult(Wire):
    """Of the pairs in which both blocks are over and count. Rates are violations per request; differences a minus b."""

    pairs: int
    pairs_left_out: int
    """Over, and one of their blocks does not count."""
    verdict: ExperimentVerdict
    rate_a: float | None = None
    rate_b: float | None = None
    mean_diff: float | None = None
    ci95: tuple[float, float] | None = None
    """Bootstrap interval of ``mean_diff``; None from a single pair."""
    p_value: float | None = None
    """Sign-flip test of "no difference", exact up to 16 pairs."""
    syncs_a: float | None = None
    """Mean per block."""
    syncs_b: float | None = None
    excess_a: float | None = None
    """Mean per block of the violations that came with syncs; None where every request met one."""
    excess_b: float | None = None


class ExperimentStatus(Wire):
    """``GET /v1/experiments/{id}``."""

    id: int
    t_s: float
    """The controller's time."""
    spec: ExperimentSpec
    state: ExperimentState
    order: tuple[Arm, ...]
    started_s: float
    ended_s: float | None
    ends_s: float
    """When the last block ends as things stand."""
    policy_after: PolicySpec
    """The one from before, that comes back at the end."""
    detail: str = ""
    blocks: tuple[Block, ...]
    """Those that have begun, the running one last."""
    result: ExperimentResult


class ExperimentPage(Wire):
    """``GET /v1/experiments``: oldest first."""

    experiments: tuple[ExperimentStatus, ...]
