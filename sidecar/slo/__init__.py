"""Service level objectives: what is asked for, how it is judged, and the accounts over sliding windows (pure)."""

from sidecar.slo.objectives import Objective, Slo, SloMetric, parse_slo

__all__ = ["Objective", "Slo", "SloMetric", "parse_slo"]
