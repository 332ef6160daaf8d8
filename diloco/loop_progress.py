"""What a training loop of one's own says of itself: to its log when a sync has ended, to a controller now and then."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from diloco.schema import Phase, Progress, SyncOutcome, SyncReport
from diloco.streaming import StreamingIsland

logger = logging.getLogger(__name__)


def log_end(report: SyncReport, *, version: int) -> None:
    """Say how a sync ended, after which the island is at that version."""
    if report.outcome is SyncOutcome.FAILED:
        logger.warning("sync failed, training goes on from local parameters detail=%s", report.detail)
        return
    logger.info(
        "sync round=%d outcome=%s inner_steps=%d tokens=%d version=%d",
        report.round,
        report.outcome,
        report.inner_steps,
        report.tokens,
        version,
    )


def loop_progress(
    member: StreamingIsland, *, num_steps: int, num_tokens: int, loss: Tensor | None, last: SyncReport | None
) -> Progress:
    """How far the island is; ``loss`` is smoothed, of shape ()."""
    return Progress(
        step=num_steps,
        inner_steps_since_sync=max(member.steps_since_sync, 0),
        tokens=num_tokens,
        tokens_since_sync=max(member.tokens_since_sync, 0),
        loss=None if loss is None else finite(float(loss)),
        update_norm=finite(member.update_norm()),
        residual_norm=member.residual_norm,
        round=member.version,
        phase=Phase.INNER,
        last_sync_at_s=None if last is None or last.outcome is SyncOutcome.FAILED else last.finished_s,
    )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
