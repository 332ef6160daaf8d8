"""Scalars of a run for TensorBoard, by inner step of the slot. Needs the package ``tensorboard``.

What cannot be written is told once and costs the scalars alone: training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from diloco.protocol import Event, ProgressEvent, SyncedEvent, WorkerConfig
from diloco.schema import Progress, SyncOutcome, SyncReport
from service.extras import require_extra

logger = logging.getLogger(__name__)

FLUSH_S = 10
Scalars = Iterator[tuple[str, float | None]]


class ScalarLog:
    """Writes what a worker tells its agent into the slot's folder."""

    def __init__(self, directory: Path, *, start_step: int, lr: Callable[[], float]) -> None:
        """``start_step``: what an earlier worker wrote of later steps is replaced.

        Raises:
            UnavailableError: tensorboard is not installed.
            OSError: the folder cannot be written.
        """
        require_extra("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: SummaryWriter | None = SummaryWriter(
            str(directory), purge_step=start_step + 1 if start_step else None, flush_secs=FLUSH_S
        )
        self._step = start_step
        self._lr = lr

    def take(self, event: Event) -> None:
        """Write the scalars of a progress or sync event; others have none."""
        if isinstance(event, ProgressEvent):
            if event.progress.step > self._step:  # the same step is told again when the phase changes
                self._write(progress_scalars(event.progress, lr=self._lr()), step=event.progress.step)
        elif isinstance(event, SyncedEvent):
            self._write(sync_scalars(event.report), step=self._step, flush=True)

    def close(self) -> None:
        """Write what is left."""
        self._write(iter(()), step=self._step, flush=True)
        if self._writer is not None:
            self._writer.close()

    def _write(self, scalars: Scalars, *, step: int, flush: bool = False) -> None:
        self._step = step
        if self._writer is None:
            return
        try:
            for name, value in scalars:
                if value is not None:
                    self._writer.add_scalar(name, value, step)
            if flush:
                self._writer.flush()
        except OSError as exc:
            logger.warning("no more scalars for TensorBoard error=%s", exc)
            self._writer = None


def open_scalars(config: WorkerConfig, *, lr: Callable[[], float]) -> ScalarLog | None:
    """The scalars of the worker's slot; None where nobody asked for them."""
    if config.tensorboard is None:
        return None
    try:
        return ScalarLog(config.tensorboard / f"slot-{config.slot}", start_step=config.start_step, lr=lr)
    except OSError as exc:
        logger.warning("no scalars for TensorBoard error=%s", exc)
        return None


def progress_scalars(progress: Progress, *, lr: float) -> Scalars:
    """Of the inner loop."""
    yield "train/loss", progress.loss
    yield "train/lr", lr
    yield "train/tokens", progress.tokens
    yield "train/step_time_s", progress.step_time_s
    yield "train/skipped_steps", progress.skipped_steps
    yield "outer/update_norm", progress.update_norm
    yield "outer/residual_norm", progress.residual_norm


def sync_scalars(report: SyncReport) -> Scalars:
    """Of an outer step."""
    yield "outer/applied", float(report.outcome is SyncOutcome.APPLIED)
    yield "outer/inner_steps", report.inner_steps
    yield "outer/bytes_pushed", report.bytes_pushed
    yield "outer/bytes_pulled", report.bytes_pulled
    yield "outer/blocked_s", report.kept_from_steps_s
    yield "outer/staleness", report.staleness
