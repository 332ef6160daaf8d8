"""Prometheus metrics of recoveries: how long each phase took, and where the state came from."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from controller.export.columns import RECOVERY_PHASES
from controller.metrics import PREFIX
from controller.schema import Recovery
from diloco.schema import Rung

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


def phase_spans(record: Recovery) -> dict[str, float]:
    """Seconds of each phase whose two times are known; hosts whose clocks differ make none negative."""
    found: dict[str, float] = {}
    for name, begin, end in RECOVERY_PHASES:
        began_s, ended_s = getattr(record, begin), getattr(record, end)
        if began_s is not None and ended_s is not None:
            found[name] = max(0.0, ended_s - began_s)
    return found


class RecoveryMetrics:
    """Fed by records that have a rung: those that end a recovery which an agent has told of."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._phases = Histogram(
            f"{PREFIX}_recovery_phase_seconds",
            "Duration of the phases of recoveries.",
            ["phase"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        for name, _, _ in RECOVERY_PHASES:
            self._phases.labels(name)
        self._rungs = Counter(
            f"{PREFIX}_recoveries_by_rung", "Recoveries by where the state came from.", ["rung"], registry=registry
        )
        for rung in Rung:
            self._rungs.labels(rung.value)
        self._steps_lost = Counter(
            f"{PREFIX}_recovery_steps_lost", "Inner steps that recoveries took again.", registry=registry
        )

    def take(self, record: Recovery) -> dict[str, float]:
        """Count it; returns the spans of its phases, none where it ends nothing."""
        if record.rung is None:
            return {}
        self._rungs.labels(record.rung.value).inc()
        self._steps_lost.inc(record.steps_lost or 0)
        spans = phase_spans(record)
        for name, span_s in spans.items():
            self._phases.labels(name).observe(span_s)
        return spans
