"""The one line that an outer step leaves in the agent's log."""

from __future__ import annotations

import logging

from diloco.schema import SyncReport

logger = logging.getLogger("diloco.agent.supervisor")


def log_outer_step(report: SyncReport, *, loss: float | None) -> None:
    pushed_s = report.pushed_s
    logger.info(
        "outer step round=%d outcome=%s inner_steps=%d tokens=%d loss=%s update_norm=%s push_s=%s total_s=%.3f "
        "blocked_s=%.3f bytes_pushed=%d bytes_pulled=%d autonomous=%s staleness=%d%s",
        report.round,
        report.outcome,
        report.inner_steps,
        report.tokens,
        _shown(loss),
        _shown(report.update_norm),
        _shown(pushed_s - report.started_s if pushed_s is not None else None),
        report.finished_s - report.started_s,
        report.kept_from_steps_s,
        report.bytes_pushed,
        report.bytes_pulled,
        report.autonomous,
        report.staleness,
        f" detail={report.detail}" if report.detail else "",
    )


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
