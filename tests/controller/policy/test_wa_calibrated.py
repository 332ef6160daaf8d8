"""``wa_calibrated``: the score of ``wa_diloco`` less the cost of a sync."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.policy import make_policy
from controller.policy.base import Decision, FleetView
from controller.schema import PolicySpec, Reason
from tests.controller.policy.views import CONTEXT, costs, fleet

AHEAD = ((0.0, 1.0), (2.0, 3.0))


def decide(name: str, view: FleetView, **params: float) -> Decision:
    return make_policy(PolicySpec(name=name, params=params), CONTEXT).decide(view, 100.0)


def test_the_cost_of_a_sync_is_taken_off_the_score() -> None:
    view = replace(fleet(), costs=costs(0.0, [0.0], ahead_per_s=AHEAD), expected_sync_s=2.0)
    terms = decide("wa_calibrated", view, sync_cost_scale=8.0, w_sync=0.5).terms
    assert terms["sync_cost"] == pytest.approx(4.0)
    assert terms["cost_sync"] == pytest.approx(0.25)
    assert terms["score"] == pytest.approx(decide("wa_diloco", view).terms["score"] - 0.25)


def test_a_cost_that_is_unknown_counts_as_a_full_one() -> None:
    for unknown in (None, costs(0.0, [0.0])):
        terms = decide("wa_calibrated", replace(fleet(), costs=unknown)).terms
        assert terms["cost_sync"] == 1.0
        assert "sync_cost" not in terms


def test_the_cost_decides_where_the_score_alone_would_sync() -> None:
    cheap = replace(fleet(), costs=costs(0.0, [0.0], ahead_per_s=((0.0, 0.0),)))
    dear = replace(fleet(), costs=costs(0.0, [0.0], ahead_per_s=((0.0, 50.0),)))
    reasons = [decide("wa_calibrated", view, threshold=-0.5).reason for view in (cheap, dear)]
    assert reasons == [Reason.SCORE_ABOVE_THRESHOLD, Reason.SCORE_BELOW_THRESHOLD]
