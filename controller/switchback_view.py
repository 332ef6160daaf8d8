"""How an experiment looks in a terminal: a bar while it runs, a table at its end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from controller.lab_schema import (
    Arm,
    Block,
    Disturbance,
    ExperimentResult,
    ExperimentState,
    ExperimentStatus,
    ExperimentVerdict,
)

LINE_PERIOD_S = 60.0
WORDS = {
    ExperimentVerdict.A_BETTER: "a has fewer violations",
    ExperimentVerdict.B_BETTER: "b has fewer violations",
    ExperimentVerdict.NO_DIFFERENCE: "no difference that these blocks could show",
    ExperimentVerdict.TOO_FEW_PAIRS: "too few pairs of blocks to say: six are the least",
    ExperimentVerdict.UNEQUAL_SYNCS: "the arms did not spend the same number of syncs: nothing can be said of timing",
}
LEFT_OUT = {Disturbance.PAUSED: "paused", Disturbance.STOPPED: "stopped"}


class ProgressView:
    """The state of a running experiment; use as a context manager."""

    def __init__(self, console: Console, status: ExperimentStatus) -> None:
        self._console = console
        self._last = ("", 0.0)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, detail="")
        self.show(status)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, status: ExperimentStatus) -> None:
        block = status.blocks[-1]
        title = f"block {block.index + 1}/{status.spec.blocks} {block.arm} {_phase(status, block)}"
        left_s = max(0.0, status.ends_s - status.t_s)
        detail = f"{_duration(left_s)} left · {_syncs(status)}{_so_far(status.result)}"
        total_s = max(1.0, status.ends_s - status.started_s)
        self._say(title, detail, completed=min(total_s, status.t_s - status.started_s), total=total_s)

    def away(self, why: str) -> None:
        self._say("the controller is away", why)

    def _say(self, title: str, detail: str, **bar: float) -> None:
        self._bar.update(self._task, description=escape(title), detail=escape(detail), **bar)  # type: ignore[arg-type]
        said, at_s = self._last
        if not self._console.is_terminal and (title != said or time.monotonic() - at_s > LINE_PERIOD_S):
            self._console.print(f"{title} · {detail}", highlight=False, soft_wrap=True, markup=False)
            self._last = (title, time.monotonic())


def show(status: ExperimentStatus, console: Console) -> None:
    """The pairs, the means, and what they say."""
    names = {Arm.A: status.spec.a.label, Arm.B: status.spec.b.label}
    for arm, name in names.items():
        console.print(f"{arm}  {name}", highlight=False, markup=False)
    console.print(pair_table(status))
    result = status.result
    for line in summary_lines(result, status.spec.syncs_per_block):
        console.print(line, highlight=False, markup=False)
    if status.state is ExperimentState.STOPPED:
        console.print(f"It was stopped. {status.detail}".rstrip(), highlight=False, markup=False)
    console.print(f"policy now: {status.policy_after.label}", highlight=False, markup=False)


def pair_table(status: ExperimentStatus) -> Table:
    """One row per pair of blocks; what does not count says why."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("pair", "order", "a", "b", "a - b", "syncs a/b", "requests a/b", ""):
        table.add_column(name, justify="left" if name in {"order", ""} else "right")
    for pair in range(0, len(status.blocks), 2):
        both = status.blocks[pair : pair + 2]
        arms = {block.arm: block for block in both}
        a, b = arms.get(Arm.A), arms.get(Arm.B)
        difference = None if a is None or b is None or a.rate is None or b.rate is None else a.rate - b.rate
        table.add_row(
            str(pair // 2 + 1),
            "".join(block.arm for block in both),
            _percent(None if a is None else a.rate),
            _percent(None if b is None else b.rate),
            _percent(difference, signed=True),
            "/".join("-" if block is None else str(block.syncs) for block in (a, b)),
            "/".join("-" if block is None else f"{block.requests:.0f}" for block in (a, b)),
            _remark(both),
        )
    return table


def summary_lines(result: ExperimentResult, syncs_per_block: int) -> list[str]:
    lines = [f"{result.pairs} pairs count, {result.pairs_left_out} left out: {WORDS[result.verdict]}"]
    if result.mean_diff is not None:
        interval = "" if result.ci95 is None else f", 95 % interval {_interval(result.ci95)}"
        p_value = "" if result.p_value is None else f", p {result.p_value:.3g}"
        lines.append(
            f"violations: a {_percent(result.rate_a)}, b {_percent(result.rate_b)},"
            f" a - b {_percent(result.mean_diff, signed=True)}{interval}{p_value}"
        )
        lines.append(f"syncs per block: a {result.syncs_a:.2f}, b {result.syncs_b:.2f} of {syncs_per_block}")
    if result.excess_a is not None and result.excess_b is not None:
        lines.append(f"violations that came with syncs, per block: a {result.excess_a:.2f}, b {result.excess_b:.2f}")
    return lines


def _phase(status: ExperimentStatus, block: Block) -> str:
    if status.t_s < block.counts_from_s:
        return "washout"
    return "counts" if status.t_s < block.ends_s else "last samples"


def _syncs(status: ExperimentStatus) -> str:
    """What each arm has spent of what its blocks until now may spend."""
    spent = {arm: sum(block.syncs for block in status.blocks if block.arm is arm) for arm in Arm}
    most = {arm: status.spec.syncs_per_block * sum(block.arm is arm for block in status.blocks) for arm in Arm}
    return "syncs " + ", ".join(f"{arm} {spent[arm]}/{most[arm]}" for arm in Arm)


def _so_far(result: ExperimentResult) -> str:
    if result.mean_diff is None:
        return ""
    return f" · after {result.pairs} pairs a {_percent(result.rate_a)}, b {_percent(result.rate_b)}"


def _remark(blocks: tuple[Block, ...]) -> str:
    found = [LEFT_OUT[block.disturbance] for block in blocks if block.disturbance is not None]
    found += ["no requests" for block in blocks if block.rate is None]
    found += [f"{block.arm} begun {block.attempt} times" for block in blocks if block.attempt > 1]
    return ", ".join(dict.fromkeys(found))


def _percent(share: float | None, *, signed: bool = False) -> str:
    if share is None:
        return "-"
    return f"{100 * share:+.2f} %" if signed else f"{100 * share:.2f} %"


def _interval(ends: tuple[float, float]) -> str:
    return f"[{_percent(ends[0], signed=True)}, {_percent(ends[1], signed=True)}]"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else (f"{minutes} min {rest:02} s" if minutes else f"{rest} s")
