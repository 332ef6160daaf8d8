"""Live progress of a replay: one bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from replay.experiment import Progress

LINE_PERIOD_S = 10.0


class ProgressView:
    """Shows `Progress` as it comes; use as a context manager."""

    def __init__(self, console: Console, num_runs: int) -> None:
        self._console = console
        self._num_runs = num_runs
        self._run = 0
        self._name = ""
        self._last_line_s = 0.0
        self._last_stage = ""
        self._task: TaskID | None = None
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Something that takes a while and belongs to no run."""
        self._describe(text, "", completed=0.0, total=None)
        self._line(text)

    def show(self, progress: Progress) -> None:
        """The newest state of the run that is on."""
        if progress.spec.name != self._name:
            self._name = progress.spec.name
            self._run += 1
        title = f"run {self._run}/{self._num_runs} {progress.spec.policy}: {progress.stage}"
        detail = _detail(progress)
        total = progress.duration_s or None
        self._describe(title, detail, completed=min(max(progress.elapsed_s, 0.0), progress.duration_s), total=total)
        due = time.monotonic() - self._last_line_s > LINE_PERIOD_S
        if title != self._last_stage or due:
            self._line(f"{title} {detail}".rstrip())
            self._last_stage = title

    def _describe(self, title: str, detail: str, *, completed: float, total: float | None) -> None:
        if self._task is None:
            self._task = self._bar.add_task(title, total=total, detail=detail)
        self._bar.update(self._task, description=title, completed=completed, total=total, detail=detail)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, soft_wrap=True)
            self._last_line_s = time.monotonic()


def _detail(progress: Progress) -> str:
    if not progress.duration_s:
        return ""
    parts = [
        f"{max(progress.elapsed_s, 0.0):.0f}/{progress.duration_s:.0f} s",
        f"{progress.answered} answered, {progress.violations} over the SLO",
    ]
    if progress.steps:
        loss = f", loss {progress.loss:.3f}" if progress.loss is not None else ""
        parts.append(f"{progress.steps} inner steps{loss}, {progress.syncs} syncs")
    return " · ".join(parts)
