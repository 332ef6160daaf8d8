"""What was learned goes through JSON and comes back the same; what does not fit is refused whole."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from pydantic import ValidationError

from sidecar.forecast import HORIZONS_S, BurstForecaster, SmoothingForecaster
from sidecar.forecast.state import BurstState, ForecasterState


def series(num: int) -> list[float]:
    rng = random.Random(1)
    return [max(0.0, 10 + 6 * math.sin(2 * math.pi * i / 30) + rng.gauss(0, 2)) for i in range(num)]


def learned(num: int = 1500) -> tuple[SmoothingForecaster, BurstForecaster]:
    forecaster, bursts = SmoothingForecaster(tick_s=1.0), BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S)
    for i, value in enumerate(series(num)):
        forecaster.observe(value, now_s=float(i))
        bursts.observe(value, interval_s=1.0, now_s=float(i))
    return forecaster, bursts


@pytest.mark.parametrize("num", [0, 1, 30, 1500])
def test_predictions_survive(num: int) -> None:
    forecaster, bursts = learned(num)
    after, bursts_after = SmoothingForecaster(tick_s=1.0), BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S)
    after.restore(ForecasterState.model_validate_json(forecaster.export().model_dump_json()), age_s=1.0)
    bursts_after.restore(BurstState.model_validate_json(bursts.export().model_dump_json()), age_s=1.0)
    assert after.export() == forecaster.export()
    assert bursts_after.export() == bursts.export()
    assert after.season_s == forecaster.season_s
    for horizon_s in HORIZONS_S:
        expected, seen = forecaster.predict(horizon_s), after.predict(horizon_s)
        if expected is None:
            assert seen is None
            continue
        assert seen is not None
        # Weights are worked out anew, where the first process did so some outcomes ago.
        for name in ("point", "q10", "q50", "q90"):
            assert getattr(seen, name) == pytest.approx(getattr(expected, name), rel=0.25, abs=0.1)
        burst, burst_after = bursts.predict(horizon_s), bursts_after.predict(horizon_s)
        assert (burst is None) == (burst_after is None)
        if burst and burst_after:
            assert burst_after.level == pytest.approx(burst.level, rel=0.041)
            assert burst_after.probability == pytest.approx(burst.probability, abs=0.03)


def test_the_series_goes_on_after_a_short_stop_and_restarts_after_a_long_one() -> None:
    state = learned()[0].export()
    short, long = SmoothingForecaster(tick_s=1.0), SmoothingForecaster(tick_s=1.0)
    short.restore(state, age_s=2.0)
    long.restore(state, age_s=600.0)
    for forecaster in (short, long):
        forecaster.observe(10.0, now_s=7.0)
    assert short.season_s == 30.0
    assert long.season_s is None


def broken(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**state, **changes}


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    forecaster, bursts = learned(300)
    state = forecaster.export().model_dump(mode="json")
    track = state["tracks"][0]
    for wrong in (
        broken(state, tick_s=5.0),
        broken(state, tracks=state["tracks"][:-1]),
        broken(state, levels=[1.0]),
        broken(state, trends=[]),
        broken(state, tracks=[{**track, "blend": {**track["blend"], "sxx": [1.0]}}, *state["tracks"][1:]]),
        broken(state, tracks=[{**track, "residuals": []}, *state["tracks"][1:]]),
    ):
        fresh = SmoothingForecaster(tick_s=1.0)
        with pytest.raises(ValueError, match=r"has|is"):
            fresh.restore(ForecasterState.model_validate(wrong), age_s=0.0)
        assert fresh.predict(1.0) is None
    burst = bursts.export().model_dump(mode="json")
    burst["tracks"][0]["counts"] = {"9999": 1.0}
    with pytest.raises(ValueError, match="percentile"):
        BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S).restore(BurstState.model_validate(burst), age_s=0.0)


def test_a_file_from_before_dispersion_was_kept_still_loads() -> None:
    bursts = learned()[1]
    state = bursts.export().model_dump(mode="json")
    del state["dispersion"]
    after = BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S)
    after.restore(BurstState.model_validate(state), age_s=1.0)
    assert after.dispersion.allan == 1.0
    assert after.export().tracks == bursts.export().tracks


def test_numbers_that_are_not_finite_are_refused() -> None:
    text = json.dumps(learned(50)[0].export().model_dump(mode="json")).replace('"mean": ', '"mean": 1e999, "x": ', 1)
    with pytest.raises(ValidationError):
        ForecasterState.model_validate_json(text)
