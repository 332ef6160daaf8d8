"""What the synchronizer tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco.schema import STALENESS_BUCKETS
from diloco.stages import STAGES, Stage
from diloco.synchronizer.rounds import Close

STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Verdict(StrEnum):
    """What became of an upload to the open round."""

    ACCEPTED = "accepted"
    REPLACED = "replaced"
    """Accepted, in place of an earlier one of the same slot."""
    REPEATED = "repeated"
    """Had been accepted before."""
    STALE = "stale"
    """Accepted into a later round than its own, with less weight."""
    INVALID = "invalid"
    LATE = "late"
    MERGED = "merged"
    """Against parameters from before those that its slot's last contribution is in, or less than that has."""
    EARLY = "early"
    OTHER_RUN = "other_run"
    """For a run that was here before, or is elsewhere."""
    FENCED = "fenced"
    DROPPED = "dropped"
    """Accepted, and left out of an outer step that overflowed with it."""


class Direction(StrEnum):
    IN = "in"
    OUT = "out"


SYNCHRONIZER_STAGES = (
    Stage.DIGEST,
    Stage.STORE,
    Stage.CHECK,
    Stage.MERGE,
    Stage.ENCODE,
    Stage.SEAL,
    Stage.PERSIST,
    Stage.READ,
)


class StageCollector(Collector):
    """What this process spent on the stages of its rounds."""

    def collect(self) -> Iterable[Metric]:
        cpu, wall = (
            CounterMetricFamily(f"wadiloco_synchronizer_stage_{name}", f"{what} by stage of a round", labels=["stage"])
            for name, what in (("cpu_seconds", "CPU time"), ("seconds", "Time"))
        )
        for stage, spent in STAGES.spent().items():
            if stage in SYNCHRONIZER_STAGES:
                cpu.add_metric([stage], spent.cpu_s)
                wall.add_metric([stage], spent.wall_s)
        return (cpu, wall)


class Metrics:
    """The series of one synchronizer, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "wadiloco_synchronizer_"
        self.rounds = Counter(
            f"{prefix}rounds", "Outer steps taken, by why the round closed", ["outcome"], registry=self.registry
        )
        self.contributions = Counter(
            f"{prefix}contributions", "Contributions by outcome", ["outcome"], registry=self.registry
        )
        self.bytes = Counter(f"{prefix}bytes", "Bytes of parameters moved", ["direction"], registry=self.registry)
        self.step_failures = Counter(
            f"{prefix}step_failures", "Outer steps that failed and were tried again", registry=self.registry
        )
        self.rounds_discarded = Counter(
            f"{prefix}rounds_discarded", "Rounds whose outer step was not finite", registry=self.registry
        )
        self.step_seconds = Histogram(
            f"{prefix}outer_step_seconds",
            "Outer step including its way to disk",
            buckets=STEP_BUCKETS_S,
            registry=self.registry,
        )
        self.open_contributions = Gauge(
            f"{prefix}open_round_contributions", "Complete contributions to the open round", registry=self.registry
        )
        self.version = Gauge(
            f"{prefix}version", "Outer steps in the global parameters", ["fragment"], registry=self.registry
        )
        self.pseudo_gradient_norm = Gauge(
            f"{prefix}pseudo_gradient_norm",
            "L2 norm of the last mean pseudo-gradient",
            ["fragment"],
            registry=self.registry,
        )
        self.pull_residual_norm = Gauge(
            f"{prefix}pull_residual_norm",
            "L2 norm of what the parameters that islands pull lack of the exact ones",
            ["fragment"],
            registry=self.registry,
        )
        self.staleness = Histogram(
            f"{prefix}staleness_versions",
            "Versions that accepted contributions were behind",
            buckets=STALENESS_BUCKETS,
            registry=self.registry,
        )
        self.grace_seconds = Gauge(
            f"{prefix}grace_seconds", "Time that rounds stay open for stragglers now", registry=self.registry
        )
        self.registry.register(StageCollector())
        for outcome in Close:
            self.rounds.labels(outcome)
        for verdict in Verdict:
            self.contributions.labels(verdict)
        for direction in Direction:
            self.bytes.labels(direction)
