"""The automatic forecaster against fixed smoothing factors and against Holt-Winters refitted every minute.

Bins of one second, the first `WARM_UP_S` are not judged (on seasonal traffic `SEASON_WARM_UP_S`: the season is found
first). A burst ahead is that the arrivals of the next h seconds reach
their 90th percentile over what is judged; forecasts are scored by the area under the ROC curve. Holt-Winters is
statsmodels', additive, refitted every minute on the last `FIT_S` seconds and carried on with these parameters in
between; it is told the season where there is one.

    make bench-forecast            WADILOCO_AZURE_TRACE=FILE names the Azure code trace
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from statsmodels.tsa.holtwinters import ExponentialSmoothing

from sidecar.forecast import HORIZONS_S, BurstForecaster, SmoothingForecaster
from sidecar.forecast.seasonal import HoltWinters, Seasonal
from tests.bench.forecast_series import SEASON_S, Series, azure, drifting, on_off, seasonal

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

WARM_UP_S, FIT_S, REFIT_S = 600, 600, 60
FACTORS = (0.02, 0.05, 0.1, 0.2, 0.4)
BURST_HORIZONS_S = (5, 15, 60)
# The constants of the forecaster were chosen with other seeds.
SEEDS = tuple(range(101, 113))
NUM_REFITTED_SEEDS = 1
# Until the season is found; what is not yet known cannot be compared with what is told.
SEASON_WARM_UP_S = 1800
NUM_TIMED, MAX_US_PER_OBSERVATION = 5, 50.0


class Kind(NamedTuple):
    """Series of one sort."""

    name: str
    series: list[Series]
    season_s: int | None = None
    warm_up_s: int = WARM_UP_S


class Run(NamedTuple):
    """What was predicted for each second; horizons along the second axis."""

    point: NDArray[np.float64]  # [T, H]
    median: NDArray[np.float64]  # [T, H]
    q90: NDArray[np.float64]  # [T, H]
    burst: NDArray[np.float64]  # [T, H]


@pytest.fixture(scope="module")
def kinds() -> list[Kind]:
    recorded = azure()
    if recorded is None:
        print("\nthe Azure code trace is not here: set WADILOCO_AZURE_TRACE to compare on it")
    return [
        *([Kind("azure code", [recorded])] if recorded is not None else []),
        Kind("on/off", [on_off(seed) for seed in SEEDS]),
        Kind("drifting near-Poisson", [drifting(seed) for seed in SEEDS]),
        Kind("seasonal", [seasonal(seed) for seed in SEEDS[:3]], SEASON_S, SEASON_WARM_UP_S),
    ]


@pytest.fixture(scope="module")
def runs(kinds: list[Kind]) -> dict[str, list[Run]]:
    return {kind.name: [forecast(series) for series in kind.series] for kind in kinds}


def forecast(series: Series) -> Run:
    forecaster = SmoothingForecaster(tick_s=1.0)
    bursts = BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S)
    rows = []
    for second, value in enumerate(series.tolist()):
        observe(forecaster, bursts, value, second)
        row = []
        for horizon_s in HORIZONS_S:
            prediction = forecaster.predict(horizon_s)
            burst = bursts.predict(horizon_s, seasonal_mean=forecaster.seasonal_mean)
            assert prediction is not None
            row.append((prediction.point, prediction.q50, prediction.q90, burst.probability if burst else 0.1))
        rows.append(row)
    table = np.array(rows)
    return Run(*(table[:, :, i] for i in range(4)))


def observe(forecaster: SmoothingForecaster, bursts: BurstForecaster, value: float, second: int) -> None:
    forecaster.observe(value, now_s=float(second))
    bursts.observe(value, interval_s=1.0, now_s=float(second), seasonal_mean=forecaster.seasonal_mean)


def smooth(series: Series, factor: float) -> Series:
    levels, level = [], series[0]
    for value in series:
        level += factor * (value - level)
        levels.append(level)
    return np.array(levels)


def auc(scores: Series, positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: how often a positive has the higher score; ties count half."""
    negatives = np.sort(scores[~positive])
    below = np.searchsorted(negatives, scores[positive], side="left")
    upto = np.searchsorted(negatives, scores[positive], side="right")
    return float((below + upto).mean() / 2 / len(negatives))


def bursts_ahead(series: Series, horizon_s: int, warm_up_s: int) -> NDArray[np.bool_]:
    """For each judged second, whether a burst follows."""
    total = np.concatenate([[0.0], np.cumsum(series)])
    sums = total[1 + horizon_s :] - total[1:-horizon_s]
    judged = sums[warm_up_s:]
    return np.asarray(judged >= np.quantile(judged, 0.9))


def test_bursts_against_fixed_factors(kinds: list[Kind], runs: dict[str, list[Run]]) -> None:
    print("\nAUC of the burst forecast, mean over series (± standard error of the difference over seeds)")
    heads = " ".join(f"{factor:>6}" for factor in FACTORS)
    print(f"{'series':<24}{'h_s':>4}  {heads}  {'auto':>6}  auto - best")
    differences = {}
    for kind in kinds:
        for horizon_s in BURST_HORIZONS_S:
            fixed, ours = [], []
            for series, run in zip(kind.series, runs[kind.name], strict=True):
                labels = bursts_ahead(series, horizon_s, kind.warm_up_s)
                judged = slice(kind.warm_up_s, kind.warm_up_s + len(labels))
                fixed.append([auc(smooth(series, factor)[judged], labels) for factor in FACTORS])
                ours.append(auc(run.burst[judged, HORIZONS_S.index(float(horizon_s))], labels))
            best = int(np.argmax(np.mean(fixed, axis=0)))
            by_series = np.array(ours) - np.array(fixed)[:, best]
            error = f" ± {by_series.std(ddof=1) / len(by_series) ** 0.5:.3f}" if len(by_series) > 1 else ""
            cells = " ".join(f"{value:6.3f}" for value in np.mean(fixed, axis=0))
            print(
                f"{kind.name:<24}{horizon_s:>4}  {cells}  {np.mean(ours):6.3f}"
                f"  {by_series.mean():+.3f}{error} (best {FACTORS[best]})"
            )
            differences[kind.name, horizon_s] = by_series.mean()
    if ("azure code", 5) in differences:
        assert all(differences["azure code", horizon_s] >= 0 for horizon_s in BURST_HORIZONS_S)
    # The automatic forecaster has no hindsight; what it may lose by that on near-Poisson traffic is within the noise.
    assert all(differences["drifting near-Poisson", horizon_s] >= -0.005 for horizon_s in BURST_HORIZONS_S)


def test_errors_against_holt_winters_refitted_every_minute(kinds: list[Kind], runs: dict[str, list[Run]]) -> None:
    print("\nMean absolute error in arrivals/s; ratio of the automatic forecaster to Holt-Winters refitted each minute")
    print(f"{'series':<24}{'h_s':>4}  {'refit':>6}  {'mean':>6} {'ratio':>6}  {'median':>6} {'ratio':>6}")
    for kind in kinds:
        for series, run in list(zip(kind.series, runs[kind.name], strict=True))[:NUM_REFITTED_SEEDS]:
            reference = refitted(series, kind.season_s)
            for column, horizon_s in enumerate(HORIZONS_S):
                ahead = int(horizon_s)
                judged = np.arange(kind.warm_up_s, len(series) - ahead)
                errors = [
                    float(np.abs(series[judged + ahead] - predicted[judged, column]).mean())
                    for predicted in (reference, run.point, run.median)
                ]
                refit, mean, median = errors
                print(
                    f"{kind.name:<24}{ahead:>4}  {refit:6.3f}  {mean:6.3f} {mean / refit:6.3f}"
                    f"  {median:6.3f} {median / refit:6.3f}"
                )
                # The median is what least absolute errors ask for. A season that had to be found is shown only.
                assert kind.season_s is not None or median / refit <= 1.05


def refitted(series: Series, season_s: int | None) -> NDArray[np.float64]:
    """Forecasts of Holt-Winters for each second, [T, H]."""
    rows = np.zeros((len(series), len(HORIZONS_S)))
    edges = [*range(WARM_UP_S, len(series), REFIT_S), len(series)]
    for start, end in pairwise(edges):
        first = start - FIT_S
        predict, observe = fit(series[first:start], season_s)
        for second in range(start, end):
            observe(float(series[second]))
            rows[second] = [max(predict(horizon_s), 0.0) for horizon_s in HORIZONS_S]
    return rows


def fit(values: Series, season_s: int | None) -> tuple[Callable[[float], float], Callable[[float], None]]:
    """Fit on ``values``; returns what predicts so many seconds ahead, and what takes in one value more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = ExponentialSmoothing(
            values,
            trend="add",
            seasonal="add" if season_s else None,
            seasonal_periods=season_s,
            initialization_method="estimated",
        ).fit()
    parameters = fitted.params
    model = Seasonal(
        float(parameters["smoothing_level"]),
        float(parameters["smoothing_trend"]),
        float(parameters["smoothing_seasonal"]) if season_s else 0.0,
    )
    seasons = [float(value) for value in parameters["initial_seasons"]] if season_s else [0.0]
    state = HoltWinters(
        model,
        seasons,
        level=float(parameters["initial_level"]),
        trend=float(parameters["initial_trend"]),
        tick=-1.0,
    )
    for value in values:
        state.observe(float(value), num_ticks=1.0)
    return state.after, lambda value: state.observe(value, num_ticks=1.0)


def test_coverage_of_the_nominal_90_percent(kinds: list[Kind], runs: dict[str, list[Run]]) -> None:
    print(
        "\nShare of the values at or under the 90 % quantile, mean over series (of a count with ties, the share under"
    )
    print("it is at most what is nominal and the share at or under it at least: where they enclose 90 %, it is exact)")
    print(f"{'series':<24}{'h_s':>4}  {'at or under':>11}  {'under':>6}  {'range over series':>18}")
    for kind in kinds:
        for column, horizon_s in enumerate(HORIZONS_S):
            ahead = int(horizon_s)
            upto, under = [], []
            for series, run in zip(kind.series, runs[kind.name], strict=True):
                judged = np.arange(kind.warm_up_s, len(series) - ahead)
                upto.append(float((series[judged + ahead] <= run.q90[judged, column]).mean()))
                under.append(float((series[judged + ahead] < run.q90[judged, column]).mean()))
            print(
                f"{kind.name:<24}{ahead:>4}  {np.mean(upto):11.3f}  {np.mean(under):6.3f}"
                f"  {min(upto):9.3f} to {max(upto):.3f}"
            )
            if kind.season_s is None:
                assert np.mean(upto) >= 0.87
                assert np.mean(under) <= 0.93


def test_time_per_observation(kinds: list[Kind]) -> None:
    print(f"\nCPU time per observation, all horizons and the burst forecast included, {NUM_TIMED} passes over a series")
    for kind in kinds:
        times_us = sorted(time_pass(kind.series[0]) for _ in range(NUM_TIMED))
        print(f"{kind.name:<24} least {times_us[0]:5.1f} µs, median {np.median(times_us):5.1f} µs")
        # What shares the cores can only add to it.
        assert times_us[0] <= MAX_US_PER_OBSERVATION


def time_pass(series: Series) -> float:
    """Microseconds of this thread per observation."""
    forecaster = SmoothingForecaster(tick_s=1.0)
    bursts = BurstForecaster(tick_s=1.0, horizons_s=HORIZONS_S)
    values = series.tolist()
    # What the test's own libraries left on the heap is not searched for garbage again and again.
    gc.collect()
    gc.freeze()
    started_s = time.thread_time()
    for second, value in enumerate(values):
        observe(forecaster, bursts, value, second)
    spent_s = time.thread_time() - started_s
    gc.unfreeze()
    return spent_s / len(values) * 1e6
