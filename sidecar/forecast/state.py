"""What a forecaster has learned, as a document: written by one process, taken over by the next.

Predictions under way and the window of the season finder are not part of it: they are worthless after a gap. Floats
are finite by type, and lengths are checked before anything is taken over, so that a file of another version or of
another server's settings is refused whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from sidecar.forecast.blend import Blend
from sidecar.forecast.burst import BurstTrack
from sidecar.forecast.dispersion import Dispersion
from sidecar.forecast.experts import ALPHAS, PENALTIES, SEASONALS, Experts
from sidecar.forecast.percentile import NUM_BUCKETS
from sidecar.forecast.residuals import MAX_RESIDUALS, PROBABILITIES
from sidecar.forecast.season import MAX_SEASON_TICKS
from sidecar.forecast.seasonal import HoltWinters
from sidecar.forecast.track import Track


class Document(BaseModel):
    """Finite numbers, no field that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BlendState(Document):
    num: float = Field(ge=0)
    mean: float
    syy: float = Field(ge=0)
    sxx: list[float]
    sxy: list[float]
    means: list[float]

    @classmethod
    def of(cls, blend: Blend) -> Self:
        return cls(num=blend.num, mean=blend.mean, syy=blend.syy, sxx=blend.sxx, sxy=blend.sxy, means=blend.means)

    def load(self, blend: Blend) -> None:
        blend.load(num=self.num, mean=self.mean, syy=self.syy, sxx=self.sxx, sxy=self.sxy, means=self.means)

    def check(self, num_models: int) -> None:
        if {len(self.sxx), len(self.sxy), len(self.means)} != {num_models} or min(self.sxx) < 0:
            raise ValueError(f"is about {len(self.sxx)} models, this version has {num_models}")


class ResidualsState(Document):
    residuals: list[float] = Field(max_length=MAX_RESIDUALS)
    levels: list[float] = Field(min_length=len(PROBABILITIES), max_length=len(PROBABILITIES))


class TrackState(Document):
    horizon_s: float
    blend: BlendState
    residuals: list[ResidualsState]


class SeasonalState(Document):
    level: float
    trend: float
    tick: float
    seasons: list[float] = Field(min_length=2, max_length=MAX_SEASON_TICKS)


class ForecasterState(Document):
    """`SmoothingForecaster.export`."""

    tick_s: float = Field(gt=0)
    num_observations: int = Field(ge=0)
    levels: list[float]
    trends: list[float]
    seasonals: list[SeasonalState]
    tracks: list[TrackState]


def save_forecaster(
    experts: Experts, tracks: Sequence[Track], *, tick_s: float, num_observations: int
) -> ForecasterState:
    return ForecasterState(
        tick_s=tick_s,
        num_observations=num_observations,
        levels=experts.levels,
        trends=experts.trends,
        seasonals=[
            SeasonalState(level=s.level, trend=s.trend, tick=s.tick, seasons=s.seasons) for s in experts.seasonals
        ],
        tracks=[
            TrackState(
                horizon_s=track.horizon_s,
                blend=BlendState.of(track.blend),
                residuals=[ResidualsState(residuals=list(r.newest), levels=r.levels) for r in track.residuals],
            )
            for track in tracks
        ],
    )


def load_forecaster(state: ForecasterState, experts: Experts, tracks: Sequence[Track], *, tick_s: float) -> None:
    """Put ``state`` into a fresh forecaster, or raise ValueError and change nothing."""
    _check(state, tracks, tick_s=tick_s)
    experts.levels = list(state.levels)
    experts.trends = list(state.trends)
    experts.seasonals = [
        HoltWinters(model, s.seasons, level=s.level, trend=s.trend, tick=s.tick)
        for model, s in zip(SEASONALS, state.seasonals, strict=False)
    ]
    for track, saved in zip(tracks, state.tracks, strict=True):
        track.set_models(experts.penalties)
        saved.blend.load(track.blend)
        track.residuals = tuple(track.new_residuals(r.residuals, r.levels) for r in saved.residuals)


def _check(state: ForecasterState, tracks: Sequence[Track], *, tick_s: float) -> None:
    if state.tick_s != tick_s:
        raise ValueError(f"tick_s is {state.tick_s:g}, here it is {tick_s:g}")
    if [t.horizon_s for t in state.tracks] != [t.horizon_s for t in tracks]:
        raise ValueError("has other horizons")
    if len(state.seasonals) not in {0, len(SEASONALS)} or len({len(s.seasons) for s in state.seasonals}) > 1:
        raise ValueError("has other seasonal models")
    if len(state.levels) not in {0, len(PENALTIES)} or len(state.trends) != len(tracks[0].reaches):
        raise ValueError("has other models")
    for saved, track in zip(state.tracks, tracks, strict=True):
        saved.blend.check(len(PENALTIES) + len(state.seasonals))
        if len(saved.residuals) != len(track.residuals):
            raise ValueError("has residuals of other conditions")


class BurstTrackState(Document):
    horizon_s: float
    blend: BlendState
    counts: dict[int, float]
    """Weight per bucket of the burst level's percentile; empty buckets are left out."""
    num_outcomes: int = Field(ge=0)
    mean: float
    variance: float = Field(ge=0)
    intercept: float
    slope: float = Field(gt=0)
    precision: tuple[float, float, float]


class DispersionState(Document):
    squares: float = Field(ge=0)
    arrivals: float = Field(ge=0)

    @classmethod
    def of(cls, dispersion: Dispersion) -> Self:
        return cls(squares=dispersion.squares, arrivals=dispersion.arrivals)


class BurstState(Document):
    """`BurstForecaster.export`."""

    tick_s: float = Field(gt=0)
    levels: list[float]
    dispersion: DispersionState = DispersionState(squares=0.0, arrivals=0.0)
    """Files from before it was kept do not say: it is known again after a few windows."""
    tracks: list[BurstTrackState]


def save_burst(
    tracks: Sequence[BurstTrack], *, tick_s: float, levels: Sequence[float], dispersion: Dispersion
) -> BurstState:
    return BurstState(
        tick_s=tick_s,
        levels=list(levels),
        dispersion=DispersionState.of(dispersion),
        tracks=[
            BurstTrackState(
                horizon_s=track.horizon_s,
                blend=BlendState.of(track.blend),
                counts={bucket: count for bucket, count in enumerate(track.level.counts) if count > 0},
                num_outcomes=track.num_outcomes,
                mean=track.mean,
                variance=track.variance,
                intercept=track.intercept,
                slope=track.slope,
                precision=track.precision,
            )
            for track in tracks
        ],
    )


def check_burst(state: BurstState, tracks: Sequence[BurstTrack], *, tick_s: float) -> None:
    """Raise ValueError when ``state`` is not about such ``tracks``."""
    if state.tick_s != tick_s:
        raise ValueError(f"tick_s is {state.tick_s:g}, here it is {tick_s:g}")
    if [t.horizon_s for t in state.tracks] != [t.horizon_s for t in tracks]:
        raise ValueError("has other horizons")
    if len(state.levels) not in {0, len(ALPHAS)} or min(state.levels, default=0.0) < 0:
        raise ValueError("has other models")
    for saved in state.tracks:
        saved.blend.check(len(ALPHAS) + (len(saved.blend.sxx) > len(ALPHAS)))
        if any(not 0 <= bucket < NUM_BUCKETS or count < 0 for bucket, count in saved.counts.items()):
            raise ValueError("counts are not those of a percentile")


def load_burst(state: BurstState, tracks: Sequence[BurstTrack]) -> None:
    """Put ``state``, which was checked, into fresh tracks."""
    for track, saved in zip(tracks, state.tracks, strict=True):
        track.set_models(len(saved.blend.sxx))
        saved.blend.load(track.blend)
        track.level.load(saved.counts)
        track.num_outcomes = saved.num_outcomes
        track.mean, track.variance = saved.mean, saved.variance
        track.intercept, track.slope = saved.intercept, saved.slope
        track.precision = saved.precision
