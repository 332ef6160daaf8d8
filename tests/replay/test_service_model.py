"""Fixed latencies, and what a sync adds."""

from __future__ import annotations

import numpy as np
import pytest

from replay.service_model import Service, ServiceModel, cost_of_starts, serve
from sidecar.slo import parse_slo


def service(arrivals_s: list[float], tokens: int = 11, slo: str = "e2e:300ms") -> Service:
    """Each takes 0.1 s, and 0.5 s in a sync."""
    model = ServiceModel(first_token_s=0.05, per_token_s=0.005, sync_slowdown=5.0)
    return serve(np.array(arrivals_s), np.full(len(arrivals_s), tokens), model=model, slo=parse_slo(slo))


def test_a_request_takes_its_first_token_and_the_others() -> None:
    assert service([0.0]).e2e_s.tolist() == pytest.approx([0.1])


@pytest.mark.parametrize(
    ("arrival_s", "met"), [(9.89, False), (9.91, True), (10.5, True), (11.99, True), (12.0, False), (19.95, True)]
)
def test_a_request_meets_a_sync_that_overlaps_it(arrival_s: float, met: bool) -> None:
    assert service([arrival_s]).in_sync([(10.0, 12.0), (20.0, 21.0)]).tolist() == [met]


def test_without_syncs_nothing_is_met() -> None:
    assert service([1.0]).in_sync([]).tolist() == [False]


def test_in_a_sync_it_violates_what_it_meets_alone() -> None:
    assert service([1.0, 5.0]).violated([(0.0, 2.0)]).tolist() == [True, False]


def test_a_request_that_violates_anyway_is_no_fault_of_a_sync() -> None:
    long = service([1.0], tokens=100)
    assert long.violated([]).tolist() == [True]
    assert cost_of_starts(long, np.array([0.5]), sync_s=2.0).tolist() == [0]


@pytest.mark.parametrize(
    ("slo", "violates"),
    [("ttft:100ms", True), ("ttft:300ms", False), ("itl:20ms", True), ("ttft:300ms,tpot:20ms", True)],
)
def test_every_objective_is_judged(slo: str, violates: bool) -> None:
    assert service([1.0], slo=slo).violated([(0.0, 2.0)]).tolist() == [violates]


def test_the_cost_of_a_start_is_what_a_single_sync_violates() -> None:
    rng = np.random.default_rng(0)
    traffic = service(np.sort(rng.uniform(0, 60, 200)).tolist())
    starts_s = np.arange(0.5, 57, 1.0)
    alone = traffic.violated([]).sum()
    expected = [traffic.violated([(start_s, start_s + 2.0)]).sum() - alone for start_s in starts_s]
    assert cost_of_starts(traffic, starts_s, sync_s=2.0).tolist() == expected


def test_a_later_beginning_drops_what_came_before() -> None:
    assert service([1.0, 5.0, 7.0]).after(5.0).arrival_s.tolist() == [0.0, 2.0]
