"""Metrics of what is tried beside the run: headroom, policies in shadow, experiments. What is unknown is absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.lab_schema import Headroom
from controller.metrics import PREFIX

_OF_WINDOW = {
    "random_cost": ("random_violations", "Expected violations that randomly timed syncs would have added."),
    "oracle_cost": ("oracle_violations", "The same of the best times, known in hindsight."),
    "gap": ("gap_violations", "Random minus best: what timing could have saved."),
    "predictability": ("predictability", "Correlation of a second's sync cost with that of a sync right after it."),
}
_OF_POLICY = {
    "cost": ("violations", "Expected violations that the policy's syncs added."),
    "share_closed": ("share_closed", "Share of the way from random to best that the policy went."),
    "as_cheap_frac": ("as_cheap_frac", "Share of random schedules that cost as little or less than the policy's."),
    "priced_syncs": ("syncs", "Syncs of the policy in the window whose cost is known."),
}


class LabMetrics:
    """Counters that shadow policies and the parts of the lab keep themselves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.shadow_decisions = Counter(
            f"{PREFIX}_shadow_decisions",
            "Decisions of policies in shadow.",
            ("policy", "action", "reason"),
            registry=registry,
        )
        self.shadow_failures = Counter(
            f"{PREFIX}_shadow_failures",
            "Times that a policy in shadow raised, or took too long, and was sent to rest.",
            ("policy",),
            registry=registry,
        )
        self.failures = Counter(
            f"{PREFIX}_lab_failures", "Failures of experiment or headroom, by part.", ("part",), registry=registry
        )


class LabCollector(Collector):
    """Reads the newest headroom, and the block of the running experiment, at each scrape."""

    def __init__(self, headroom: Callable[[], Headroom | None], block: Callable[[], int | None]) -> None:
        self._headroom = headroom
        self._block = block

    def collect(self) -> Iterable[Metric]:
        block = self._block()
        text = "Block of the running experiment, from 0; absent without one."
        if block is not None:
            yield GaugeMetricFamily(f"{PREFIX}_experiment_block", text, value=block)
        report = self._headroom()
        if report is not None:
            yield from _headroom_families(report)


def _headroom_families(report: Headroom) -> Iterable[Metric]:
    verdict = GaugeMetricFamily(f"{PREFIX}_headroom_verdict", "1 for the verdict that holds.", labels=["verdict"])
    verdict.add_metric([report.verdict.value], 1)
    yield verdict
    for field, (name, text) in _OF_WINDOW.items():
        value = getattr(report, field)
        if value is not None:
            yield GaugeMetricFamily(f"{PREFIX}_headroom_{name}", text, value=value)
    for field, (name, text) in _OF_POLICY.items():
        known = [(one, getattr(one, field)) for one in report.policies]
        family = GaugeMetricFamily(f"{PREFIX}_headroom_policy_{name}", text, labels=["policy", "shadow"])
        for one, value in known:
            if value is not None:
                family.add_metric([one.policy, "true" if one.shadow else "false"], value)
        if family.samples:
            yield family
