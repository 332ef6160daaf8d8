"""Wire contract of the sidecar: what it says about one vLLM server.

A missing value is ``None``, never 0: an absent series, the first scrape and a counter reset are all unknown.
Wall-clock times are Unix seconds; durations are seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from service.wire import PART, Order, Wire

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
PhaseName = Literal["none", "inner", "sync"]


class EngineState(StrEnum):
    """What the scrapes say about the engine."""

    STARTING = "starting"
    """Refuses connections and was never seen READY."""
    READY = "ready"
    STALE = "stale"
    """The last good scrape is too old (time-outs: the server is saturated)."""
    STALLED = "stalled"
    """Requests are in the engine, yet no step and no token for a minute."""
    SLEEPING = "sleeping"
    DRAINING = "draining"
    """Serves its metrics and says at ``/health`` that it takes no requests."""
    METRICS_DISABLED = "metrics_disabled"
    """Answers, but without one ``vllm:`` series (``--disable-log-stats``, or not a vLLM server)."""
    DOWN = "down"
    """Refuses connections after it was READY."""


@dataclass(frozen=True, slots=True, kw_only=True, config=PART)
class ForecastPoint:
    """Forecast for the interval that ends ``horizon_s`` from now."""

    horizon_s: float = Field(gt=0, examples=[5.0])
    arrivals_per_s: NonNegative = Field(examples=[3.2])
    """The mean. Least absolute errors has the median, ``arrivals_per_s_q50``."""
    arrivals_per_s_q10: NonNegative = Field(examples=[0.0])
    arrivals_per_s_q50: NonNegative = Field(examples=[2.0])
    arrivals_per_s_q90: NonNegative = Field(examples=[8.0])
    running: NonNegative | None = Field(default=None, examples=[4.1])
    """Expected number of requests in the engine (running and waiting)."""
    running_q90: NonNegative | None = Field(default=None, examples=[9.0])
    method: str | None = Field(default=None, max_length=64, examples=["simple"])
    """The kind of model that counts most for the arrivals at this horizon: ``simple``, ``holt``, ``damped_holt`` or
    ``holt_winters``."""
    burst_probability: Fraction | None = Field(default=None, examples=[0.12])
    """Probability that the arrivals from now until ``horizon_s`` reach ``burst_arrivals``; None for horizons other than
    the usual ones, and before the horizon has passed once."""
    burst_arrivals: NonNegative | None = Field(default=None, examples=[42.0])
    """The burst level: the 90th percentile of the arrivals in ``horizon_s`` seconds, over the past."""


@dataclass(frozen=True, slots=True, kw_only=True, config=PART)
class SyncCostPoint:
    start_s: NonNegative = Field(examples=[5.0])
    """Seconds from now at which the sync would start."""
    violations: NonNegative = Field(examples=[0.8])
    """Expected violations that the sync adds."""


class LoadSample(Wire):
    """One observation of one server: the difference of two scrapes, and the forecast made from all before."""

    server_id: Name
    node: Name
    """Host that the server runs on; binds the sidecar to the islands of that host."""
    t_s: float = Field(ge=0)
    """Unix time at the end of the interval."""
    interval_s: float | None = Field(default=None, gt=0)
    """Length of the interval; None on the first scrape and after a counter reset, when all deltas are None too."""
    state: EngineState
    running: NonNegative | None = None
    waiting: NonNegative | None = None
    waiting_capacity: NonNegative | None = None
    """Of those that wait, the ones that wait for room in the engine; None where the server does not tell them apart."""
    kv_usage_frac: Fraction | None = None
    arrivals: NonNegative | None = None
    """Requests that arrived in the interval (estimate: vLLM exports no arrival counter)."""
    finished: NonNegative | None = None
    prompt_tokens: NonNegative | None = None
    generation_tokens: NonNegative | None = None
    preemptions: NonNegative | None = None
    rejections: NonNegative | None = None
    ttft_mean_s: NonNegative | None = None
    itl_mean_s: NonNegative | None = None
    e2e_mean_s: NonNegative | None = None
    slo_requests: NonNegative | None = None
    """Requests that were judged against the SLO in the interval: when they finished, or at their first token where TTFT
    is its only objective."""
    slo_violations: NonNegative | None = None
    """Of those, how many certainly missed at least one of its objectives (a lower bound; exact with the plugin, and for
    a single objective whose threshold is on a bucket edge)."""
    slo_violations_upper: NonNegative | None = None
    """How many may have missed one; equal to ``slo_violations`` where that is exact."""
    slo_target_frac: Fraction | None = None
    """Share of requests that must meet all objectives."""
    pressure_frac: Fraction | None = None
    """How loaded the server is now and within the next seconds: 0 idle, 1 full. None is unknown and counts as full."""
    trainer_phase: PhaseName | None = None
    """What the trainers beside the server did in the interval, the strongest of sync, inner and none; None without a
    gate, through which they tell."""
    pace: Fraction | None = None
    """How much a trainer beside the server may run, after this observation; None without a gate, which tells it."""
    gate_busy: bool | None = None
    """Whether a trainer has to wait at its next safepoint; None without a gate."""
    gate_reason: str | None = Field(default=None, max_length=64, examples=["in_flight"])
    """Why the gate, or the pace, is as it is."""
    forecast: tuple[ForecastPoint, ...] = ()
    """By horizon, from ``t_s`` on; empty while there is none, and in most samples for a controller: one in five seconds
    carries it."""
    sync_cost_per_s: NonNegative | None = None
    """Violations per second that a sync would have added in the interval: arrivals per second times what a sync adds
    to P(violation) at its load, as learned so far. None where the interval's arrivals or load are unknown."""
    sync_costs_ahead: tuple[SyncCostPoint, ...] = ()
    """The same for the time to come: expected violations of a sync of one second by when it would start, from now to a
    minute ahead; empty while there is no forecast."""


class TrainerStatus(Wire):
    """What the trainers beside the server tell."""

    num_trainers: int = Field(ge=0, examples=[1])
    """That live, and say what they do."""
    phase: PhaseName = Field(examples=["inner"])
    """At the last scrape, the strongest of sync, inner and none."""
    phase_seconds_total: dict[PhaseName, NonNegative] = Field(
        examples=[{"none": 12.0, "inner": 40.5, "sync": 1.5}], default_factory=dict
    )
    """Seconds in each phase since the sidecar started, added over the trainers."""


class GateStatus(Wire):
    """What the trainer beside the server sees in the gate."""

    busy: bool
    reason: str = Field(examples=["in_flight"])
    source: str | None = Field(default=None, examples=["ingress", "engine", "scrape"])
    """Who says so: the middleware, the engine's steps, or the scrape (then at its cadence); None while nobody does."""
    in_flight: int | None = None
    error: str | None = None
    """What is wrong with the sidecar's part: it cannot write it, or another sidecar writes this gate too."""


class ScrapeStatus(Wire):
    """How the newest scrape went."""

    outcome: str = Field(examples=["ok", "timeout", "refused"])
    detail: str = Field(examples=[""])
    """What failed, and what to do about it."""
    duration_s: NonNegative = Field(examples=[0.012])
    interval_s: NonNegative = Field(examples=[1.0])
    """Until the next scrape: the usual interval, or a longer one while the server is slow to answer."""


class Load(Wire):
    """``GET /v1/load``."""

    sample: LoadSample | None
    """The newest observation; None before the first scrape."""
    age_s: float | None
    state: EngineState
    since_s: float
    """Unix time since which the state holds."""
    signals: dict[str, str | None] = Field(
        examples=[{"running": "vllm:num_requests_running", "kv_usage": "vllm:gpu_cache_usage_perc", "rejections": None}]
    )
    """Signal → the series that matched it, or None when the server does not export it."""
    missing_signals: tuple[str, ...] = Field(default=(), examples=[["kv_usage"]])
    """Signals that the sidecar needs and the server does not export: what is made of them is unknown."""
    scrape: ScrapeStatus | None = None
    """None before the first scrape."""
    kv_capacity_tokens: NonNegative | None = Field(default=None, examples=[262144])
    """Tokens that the KV caches of the server hold."""
    source: str = Field(default="scrape", examples=["scrape", "plugin"])
    """Where the newest observation comes from: the metrics page alone, or every engine step through the plugin."""
    max_num_seqs: int | None = None
    """Requests that one engine runs at once; only the plugin tells."""
    gate: GateStatus | None = None
    """None without a gate."""
    trainer: TrainerStatus | None = None
    """None without a gate."""
    window: tuple[LoadSample, ...] = ()
    """Recent observations, oldest first (``?window_s=`` limits them)."""


class Forecast(Wire):
    """``GET /v1/forecast?horizon_s=``."""

    t_s: float = Field(examples=[1790000000.0])
    method: str = Field(examples=["simple"])
    """That of the shortest horizon; each point has its own."""
    season_s: float | None = Field(default=None, examples=[60.0])
    """Season of the arrivals that was found, None while there is none."""
    num_observations: int = Field(examples=[3600])
    points: tuple[ForecastPoint, ...]


class CalibrationBin(Wire):
    """P(violation) of a request served while so many requests are in the engine."""

    load_from: NonNegative = Field(examples=[2.0])
    load_below: NonNegative | None = Field(examples=[3.0])
    """None for the last bin, which has no upper end."""
    probability: Fraction = Field(examples=[0.04])
    low: Fraction = Field(examples=[0.02])
    high: Fraction = Field(examples=[0.07])
    """90 % interval."""
    requests: NonNegative = Field(examples=[180.0])
    """Requests that were observed in this bin; 0 when the estimate is all borrowed from prior and neighbours."""


class Calibration(Wire):
    """``GET /v1/calibration``."""

    slo: str = Field(examples=["e2e:1000ms@99%"])
    """A violation is a request that misses any of its objectives."""
    sync_duration_s: float = Field(examples=[5.0])
    phases: dict[str, tuple[CalibrationBin, ...]]
    """``none``, ``inner`` and ``sync``: what the trainer did meanwhile."""
    sync_costs: tuple[SyncCostPoint, ...]
    """From now to a minute ahead; empty while there is no forecast."""


class SloObjective(Wire):
    """One objective, and how well it can be judged."""

    metric: str = Field(examples=["ttft"])
    """``ttft``, ``itl``, ``tpot`` or ``e2e``."""
    threshold_s: float = Field(examples=[0.25])
    counts: str = Field(examples=["requests"])
    """What its own account counts: ``requests``, or ``tokens`` for ``itl``."""
    edges_s: tuple[float, float | None] | None = Field(examples=[(0.25, 0.25)])
    """The histogram edges next to the threshold, below and above (equal when it is on an edge; above None when the
    threshold is past the last edge); None before data."""
    exact: bool = Field(examples=[True])


class ObjectiveWindow(Wire):
    """One objective by itself over one sliding window; None where nothing was observed."""

    metric: str = Field(examples=["ttft"])
    observed: int | None = Field(default=None, examples=[180])
    """Requests that got their first token (``ttft``) or finished (``tpot``, ``e2e``), or tokens (``itl``)."""
    violations: int | None = Field(default=None, examples=[2])
    violations_upper: int | None = Field(default=None, examples=[2])
    attainment_frac: Fraction | None = Field(default=None, examples=[0.989])
    attainment_frac_lower: Fraction | None = Field(default=None, examples=[0.989])


class SloWindow(Wire):
    """All objectives together over one sliding window. A violation is a request that missed at least one of them.

    Counts are None when nothing was judged within the window, rates when no request was. The plain name is what the
    certain violations make of it; its other bound is what the possible ones do, equal where judging is exact.
    """

    window_s: float = Field(examples=[300.0])
    covered_s: NonNegative = Field(examples=[300.0])
    """Seconds of the window in which requests could be judged."""
    requests: int | None = Field(default=None, examples=[178])
    violations: int | None = Field(default=None, examples=[3])
    """Requests that certainly violated the SLO."""
    violations_upper: int | None = Field(default=None, examples=[5])
    """Requests that may have violated it."""
    attainment_frac: Fraction | None = Field(default=None, examples=[0.983])
    """Goodput as a share: requests that did not certainly violate."""
    attainment_frac_lower: Fraction | None = Field(default=None, examples=[0.972])
    """Requests that certainly met all objectives."""
    goodput_per_s: NonNegative | None = Field(default=None, examples=[0.583])
    """The same as a rate, over the seconds covered."""
    goodput_per_s_lower: NonNegative | None = Field(default=None, examples=[0.577])
    burn_rate: NonNegative | None = Field(default=None, examples=[1.69])
    """Violation rate over the rate that the target allows: above 1 the error budget shrinks."""
    burn_rate_upper: NonNegative | None = Field(default=None, examples=[2.81])
    error_budget_left_frac: float | None = Field(default=None, examples=[-0.69])
    """What is left of the violations that the target allows among the window's requests; negative when overspent."""
    error_budget_left_frac_lower: float | None = Field(default=None, examples=[-1.81])
    objectives: tuple[ObjectiveWindow, ...] = ()


class SloReport(Wire):
    """``GET /v1/slo``."""

    slo: str = Field(examples=["ttft:250ms,e2e:2000ms@99%"])
    target_frac: Fraction = Field(examples=[0.99])
    """Share of requests that must meet all objectives."""
    exact: bool = Field(examples=[False])
    """Whether requests are judged exactly, as of the last interval: one by one through the plugin, or by a single
    objective on a bucket edge."""
    objectives: tuple[SloObjective, ...]
    windows: tuple[SloWindow, ...]
    """A minute, five minutes, an hour."""
    fast_burn: bool | None = Field(default=None, examples=[False])
    """Whether the certain burn rates of both five minutes and an hour are 14.4 or more, Google's SRE page alert."""


class PaceMode(StrEnum):
    AUTO = "auto"
    PAUSE = "pause"
    RUN = "run"


class PaceRequest(Order):
    """``PUT /v1/pace``."""

    mode: PaceMode = Field(examples=[PaceMode.PAUSE])


class Pace(Wire):
    """``GET /v1/pace``: how much the trainer beside this server may run."""

    mode: PaceMode = Field(examples=[PaceMode.AUTO])
    pace: Fraction = Field(examples=[0.75])
    target: Fraction | None = Field(default=None, examples=[0.9])
    """What the forecast load leaves room for: the pace falls to it at once and grows towards it slowly; None while the
    load is unknown."""
    reason: str = Field(examples=["recovering"])
