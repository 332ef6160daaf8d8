"""The warning that an objective lies between the bucket edges of a page, so that its violations are bounds."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from sidecar.slo import Slo, SloMetric
from sidecar.slo.judge import Verdict

logger = logging.getLogger(__name__)

# Edges change with the server's version or the source, not with the scrape; a page whose edges wander is broken.
MAX_PAIRS = 8


class EdgeAlarm:
    """Logged once per objective and pair of edges around it, and no more after `MAX_PAIRS` pairs."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._told: defaultdict[SloMetric, set[tuple[float, float]]] = defaultdict(set)

    def check(self, verdicts: Sequence[Verdict | None]) -> None:
        """Look at one interval, a verdict per objective; None where there was nothing to judge."""
        for objective, verdict in zip(self._slo.objectives, verdicts, strict=True):
            told = self._told[objective.metric]
            if verdict is None or verdict.exact or verdict.edges_s in told or len(told) >= MAX_PAIRS:
                continue
            told.add(verdict.edges_s)
            logger.warning(
                "slo=%s is between histogram edges %g s and %g s: violations are bounds, exact only on an edge or with "
                "the plugin",
                objective,
                *verdict.edges_s,
            )
            if len(told) == MAX_PAIRS:
                logger.warning(
                    "slo=%s was between %d pairs of histogram edges: further ones are not told; give the URL of one "
                    "server, not of a load balancer, or install the plugin",
                    objective,
                    MAX_PAIRS,
                )
