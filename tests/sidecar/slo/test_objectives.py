"""The grammar of objectives: read, written back, and one clear error for what is none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InputError
from sidecar.slo import Objective, Slo, SloMetric, parse_slo

OBJECTIVES = st.lists(
    st.builds(Objective, st.sampled_from(SloMetric), st.integers(1, 10**8).map(lambda us: us * 1e-6)),
    min_size=1,
    unique_by=lambda objective: objective.metric,
).map(tuple)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("e2e:300ms", "e2e:300ms@99%"),
        (" E2E:1S ", "e2e:1000ms@99%"),
        ("ttft:.25s", "ttft:250ms@99%"),
        ("itl:0.001ms", "itl:0.001ms@99%"),
        ("tpot:50ms@90%", "tpot:50ms@90%"),
        ("ttft:200ms,itl:50ms,e2e:2s@99%", "ttft:200ms,itl:50ms,e2e:2000ms@99%"),
        ("e2e:2s , ttft:200ms @ 99.95%", "e2e:2000ms,ttft:200ms@99.95%"),
    ],
)
def test_an_slo_is_read(text: str, canonical: str) -> None:
    assert str(parse_slo(text)) == canonical


@given(OBJECTIVES, st.integers(1, 99_999).map(lambda share: share / 100_000))
def test_an_slo_that_is_written_reads_the_same(objectives: tuple[Objective, ...], target_frac: float) -> None:
    slo = parse_slo(str(Slo(objectives, target_frac)))
    assert [o.metric for o in slo.objectives] == [o.metric for o in objectives]
    assert [o.threshold_s for o in slo.objectives] == pytest.approx([o.threshold_s for o in objectives])
    assert slo.target_frac == pytest.approx(target_frac)


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("", "not an objective", "e2e:200ms"),
        ("e2e", "not an objective", "e2e:200ms"),
        ("e2e:", "not an objective", "e2e:200ms"),
        ("e2e:-5ms", "not an objective", "e2e:200ms"),
        ("e2e:nan", "not an objective", "e2e:200ms"),
        ("e2e:infs", "not an objective", "e2e:200ms"),
        ("e2e:200ms,", "'' is not an objective", "e2e:200ms"),
        ("e2e:200ms;ttft:1s", "not an objective", "e2e:200ms"),
        ("@99%", "'' is not an objective", "e2e:200ms"),
        ("e2e:200", "unit is missing", "e2e:200ms"),
        ("e2e:200m", "unit is 'm'", "e2e:200ms"),
        ("tbt:50ms", "metric 'tbt' is not one of ttft, itl, tpot, e2e", "e2e:200ms"),
        ("ttft:1s,e2e:0ms", "between a microsecond and a day", "e2e:200ms"),
        ("e2e:100000s", "between a microsecond and a day", "e2e:200ms"),
        ("e2e:1s,ttft:1s,e2e:2s", "metric e2e is there twice", "one threshold"),
        ("e2e:1s@", "target '' is not a percentage", "@99%"),
        ("e2e:1s@0.99", "not a percentage", "@99%"),
        ("e2e:1s@nan%", "not a percentage", "@99%"),
        ("e2e:1s@-1%", "not a percentage", "@99%"),
        ("e2e:1s@99%@98%", "not a percentage", "@99%"),
        ("e2e:1s@0%", "nothing but error budget", "less than 100%"),
        ("e2e:1s@100%", "no error budget", "less than 100%"),
        ("e2e:1s@140%", "no error budget", "less than 100%"),
    ],
)
def test_what_is_no_slo_is_refused_with_the_remedy(text: str, message: str, remedy: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        parse_slo(text)
    assert refused.value.field == "slo"
    assert remedy in (refused.value.remedy or "")


@pytest.mark.parametrize(
    ("text", "limits_s", "main"),
    [
        ("e2e:1s", (math.inf, math.inf, 1.0), SloMetric.E2E),
        ("itl:50ms,ttft:1s", (1.0, 0.05, math.inf), SloMetric.ITL),
        ("itl:50ms,tpot:40ms,e2e:1s", (math.inf, 0.04, 1.0), SloMetric.E2E),
        ("itl:30ms,tpot:40ms", (math.inf, 0.03, math.inf), SloMetric.ITL),
    ],
)
def test_one_request_is_held_to_ttft_tpot_and_e2e(
    text: str, limits_s: tuple[float, float, float], main: SloMetric
) -> None:
    slo = parse_slo(text)
    assert slo.request_limits_s == limits_s
    assert slo.main.metric is main
