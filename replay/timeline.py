"""The picture of a replay: for each run load, training, syncs and SLO violations over time.

One row per run with three panels (load, latency of each request, inner steps), the same axes in all rows, so that
policies can be compared by looking down a column. Syncs are shaded in all three.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from service.errors import UnavailableError
from service.files import replace_file

MAX_ROWS = 8
"""More rows would make a picture that no screen shows; the first runs stand for the rest."""
WIDTH_IN = 12.8
ROW_IN = 2.3
HEADER_IN = 0.9
DPI = 100

# Okabe and Ito's palette: told apart with any common colour blindness.
BLUE, SKY, GREEN, ORANGE, VERMILION, GREY = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#595959"

# All times are seconds after the start of the load.


@dataclass(frozen=True, slots=True)
class RequestPoint:
    arrival_s: float
    latency_ms: float | None
    """The latency that the objective judges; None when the request failed."""
    violated: bool


@dataclass(frozen=True, slots=True)
class LoadPoint:
    t_s: float
    running: float
    """Over all servers."""
    waiting: float


@dataclass(frozen=True, slots=True)
class StepPoint:
    t_s: float
    steps: int
    """Inner steps of all islands since the run began."""


@dataclass(frozen=True, slots=True)
class SyncWindow:
    start_s: float
    end_s: float
    slot: int


@dataclass(frozen=True, slots=True)
class RunTimeline:
    label: str
    duration_s: float
    requests: tuple[RequestPoint, ...]
    load: tuple[LoadPoint, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    syncs: tuple[SyncWindow, ...] = ()


def draw_timeline(runs: Sequence[RunTimeline], path: Path, *, slo: str, threshold_ms: float, title: str) -> None:
    """Write the PNG.

    Raises:
        UnavailableError: it cannot be written.
    """
    shown = runs[:MAX_ROWS]
    height_in = HEADER_IN + ROW_IN * max(len(shown), 1)
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(len(shown), 1), 3, sharex=True, sharey="col", squeeze=False)
    for row, run in zip(axes, shown, strict=False):
        _draw_load(row[0], run)
        _draw_latency(row[1], run, threshold_ms)
        _draw_steps(row[2], run)
        for panel in row:
            _shade_syncs(panel, run.syncs)
            _style(panel)
        row[0].set_title(run.label, loc="left", fontsize=10, fontweight="bold")
        row[1].set_title(_verdict(run), loc="left", fontsize=9, color=GREY)
        row[2].set_title("inner steps of all islands", loc="left", fontsize=9, color=GREY)
    _finish(figure, axes, shown, slo=slo, threshold_ms=threshold_ms)
    figure.tight_layout(w_pad=1.2, h_pad=0.6, rect=(0, 0, 1, 1 - 0.68 / height_in))
    omitted = f" (first {MAX_ROWS} of {len(runs)} runs)" if len(runs) > MAX_ROWS else ""
    figure.suptitle(f"{title}{omitted}", x=0.008, y=1 - 0.12 / height_in, ha="left", va="top", fontsize=13)
    figure.legend(
        handles=_legend(slo),
        loc="upper left",
        bbox_to_anchor=(0.002, 1 - 0.38 / height_in),
        ncols=7,
        frameon=False,
        fontsize=9,
        handlelength=1.6,
        columnspacing=1.6,
    )
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})
        replace_file(path, [picture.getbuffer()])
    except OSError as exc:
        raise UnavailableError(
            f"cannot write {path}: {exc.strerror or exc}", field="--out", remedy="free space or choose another --out"
        ) from exc


def arrivals_per_s(run: RunTimeline) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Arrivals in each second of the run."""
    num_seconds = max(1, math.ceil(run.duration_s))
    seconds = [min(int(request.arrival_s), num_seconds - 1) for request in run.requests]
    return np.bincount(np.asarray(seconds, dtype=np.int64), minlength=num_seconds)


def steps_per_s(points: Sequence[StepPoint]) -> Iterator[tuple[float, float, float]]:
    """(start, end, inner steps per second) between samples; a count that fell (a restart) gives no rate."""
    for before, after in itertools.pairwise(points):
        if after.t_s > before.t_s and after.steps >= before.steps:
            yield before.t_s, after.t_s, (after.steps - before.steps) / (after.t_s - before.t_s)


def _draw_load(panel: Axes, run: RunTimeline) -> None:
    arrivals = arrivals_per_s(run)
    panel.bar(np.arange(len(arrivals)) + 0.5, arrivals, width=1.0, color=SKY, linewidth=0)
    if run.load:
        times_s = [point.t_s for point in run.load]
        panel.step(times_s, [point.running + point.waiting for point in run.load], where="post", color=BLUE, lw=1.2)


def _draw_latency(panel: Axes, run: RunTimeline, threshold_ms: float) -> None:
    answered = [(point.arrival_s, point.latency_ms, point.violated) for point in run.requests if point.latency_ms]
    met = [(time_s, latency_ms) for time_s, latency_ms, violated in answered if not violated]
    missed = [(time_s, latency_ms) for time_s, latency_ms, violated in answered if violated]
    if met:
        times_s, latencies_ms = zip(*met, strict=True)
        panel.scatter(times_s, latencies_ms, s=7, color=GREEN, alpha=0.7, linewidths=0)
    if missed:
        times_s, latencies_ms = zip(*missed, strict=True)
        panel.scatter(times_s, latencies_ms, s=22, marker="x", color=VERMILION, linewidths=1.3)
    failed_s = [point.arrival_s for point in run.requests if point.latency_ms is None]
    if failed_s:
        # A failed request has no latency: it sits on the upper edge, whatever the scale.
        panel.plot(
            failed_s, [0.97] * len(failed_s), "v", transform=panel.get_xaxis_transform(), color="black", ms=5, zorder=3
        )
    panel.axhline(threshold_ms, color=VERMILION, lw=1, ls="--")
    panel.set_yscale("log")


def _draw_steps(panel: Axes, run: RunTimeline) -> None:
    times_s: list[float] = []
    rates: list[float] = []
    for start_s, end_s, rate in steps_per_s(run.steps):
        if times_s and times_s[-1] < start_s:
            # The rate between is unknown: a gap in the area, not a slope.
            times_s.append(start_s)
            rates.append(math.nan)
        times_s += [start_s, end_s]
        rates += [rate, rate]
    panel.fill_between(times_s, rates, color=GREY, alpha=0.5, linewidth=0)
    if not run.steps:
        panel.text(0.5, 0.5, "no training", transform=panel.transAxes, ha="center", va="center", color=GREY)


def _shade_syncs(panel: Axes, syncs: Sequence[SyncWindow]) -> None:
    for sync in syncs:
        # A sync shorter than a pixel must still be seen.
        panel.axvspan(sync.start_s, sync.end_s, facecolor=ORANGE, edgecolor=ORANGE, alpha=0.45, lw=0.8, zorder=0)


def _style(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#999999")
    panel.tick_params(labelsize=8, color="#999999")
    panel.grid(axis="y", color="#E6E6E6", lw=0.6)
    panel.set_axisbelow(True)


def _finish(
    figure: Figure,
    axes: np.ndarray[tuple[int, int], np.dtype[np.object_]],
    runs: Sequence[RunTimeline],
    *,
    slo: str,
    threshold_ms: float,
) -> None:
    metric = slo.partition(":")[0]
    for row in axes:
        for panel, label in zip(row, ("requests", f"{metric} (ms)", "inner steps/s"), strict=True):
            panel.set_ylabel(label, fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel("seconds after the start of the load", fontsize=9)
    axes[0, 0].set_xlim(0, max((run.duration_s for run in runs), default=1.0))
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes[0, 2].set_ylim(bottom=0)
    axes[0, 1].yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes[0, 1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0, 1].yaxis.set_minor_locator(NullLocator())
    latencies_ms = [point.latency_ms for run in runs for point in run.requests if point.latency_ms]
    low_ms, high_ms = min([threshold_ms, *latencies_ms]), max([threshold_ms, *latencies_ms])
    axes[0, 1].set_ylim(low_ms / 1.5, high_ms * 1.8)
    figure.align_ylabels(axes)


def _verdict(run: RunTimeline) -> str:
    if not run.requests:
        return "no requests"
    num_violations = sum(point.violated for point in run.requests)
    return (
        f"{num_violations} of {len(run.requests)} requests violate the SLO ({num_violations / len(run.requests):.1%})"
    )


def _legend(slo: str) -> list[Patch | Line2D]:
    return [
        Patch(color=SKY, label="arrivals per s"),
        Line2D([], [], color=BLUE, label="in the engines"),
        Line2D([], [], color=GREEN, marker="o", ls="", ms=4, label="met the SLO"),
        Line2D([], [], color=VERMILION, marker="x", ls="", ms=6, label="missed it"),
        Line2D([], [], color=VERMILION, ls="--", lw=1, label=f"SLO {slo}"),
        Line2D([], [], color="black", marker="v", ls="", ms=5, label="failed"),
        Patch(color=ORANGE, alpha=0.45, label="outer sync"),
    ]
