"""Which reports of an island cannot be true. Pure; the wire models have already refused what is not a finite number."""

from __future__ import annotations

from controller.schema import Heartbeat
from diloco.schema import Progress, SyncReport
from service.errors import InputError

# Far beyond any run, far below what would overflow a sum or a chart.
MAX_STEP = 10**12
MAX_TOKENS = 10**18
MAX_ROUND = 10**9
MAX_LOSS = 1e6
# An island cannot be further ahead of what the controller knows than it could sync while the controller was away.
MAX_ROUND_JUMP = 10_000
# Clocks of hosts may differ by this much.
CLOCK_TOLERANCE_S = 300.0


def check_heartbeat(beat: Heartbeat, last: Progress | None, *, version: int, now_s: float) -> None:
    """Refuse a heartbeat that contradicts itself or what the same process said before.

    Raises:
        InputError: naming the field.
    """
    if beat.progress is not None:
        _check_progress(beat.progress, version)
        if last is not None:
            _check_advance(beat.progress, last)
    for index, report in enumerate(beat.syncs):
        _check_sync(report, f"syncs.{index}", version=version, now_s=now_s)


def _check_progress(progress: Progress, version: int) -> None:
    _at_most(progress.step, MAX_STEP, "progress.step")
    _at_most(progress.tokens, MAX_TOKENS, "progress.tokens")
    _at_most(progress.inner_steps_since_sync, MAX_STEP, "progress.inner_steps_since_sync")
    _at_most(progress.tokens_since_sync, MAX_TOKENS, "progress.tokens_since_sync")
    _check_round(progress.round, "progress.round", version)
    for name in ("loss", "loss_at_sync"):
        loss = getattr(progress, name)
        if loss is not None and abs(loss) > MAX_LOSS:
            raise _nonsense(f"{loss:g} is no training loss", f"progress.{name}")


def _check_advance(progress: Progress, last: Progress) -> None:
    if progress.restarts < last.restarts:
        raise _nonsense(f"went back from {last.restarts} to {progress.restarts}", "progress.restarts")
    if progress.restarts == last.restarts and progress.step < last.step:
        raise _nonsense(f"went back from {last.step} to {progress.step} without a restart", "progress.step")


def _check_sync(report: SyncReport, where: str, *, version: int, now_s: float) -> None:
    _check_round(report.round, f"{where}.round", version)
    _at_most(report.inner_steps, MAX_STEP, f"{where}.inner_steps")
    _at_most(report.tokens, MAX_TOKENS, f"{where}.tokens")
    _at_most(report.bytes_pushed, MAX_TOKENS, f"{where}.bytes_pushed")
    _at_most(report.bytes_pulled, MAX_TOKENS, f"{where}.bytes_pulled")
    if report.finished_s < report.started_s:
        raise _nonsense("ends before it starts", f"{where}.finished_s")
    if report.finished_s > now_s + CLOCK_TOLERANCE_S:
        raise _nonsense("lies in the future", f"{where}.finished_s")


def _check_round(round_: int, where: str, version: int) -> None:
    _at_most(round_, MAX_ROUND, where)
    if version > 0 and round_ > version + MAX_ROUND_JUMP:
        raise _nonsense(f"{round_} is far ahead of the run's {version}", where)


def _at_most(value: int, limit: int, where: str) -> None:
    if value > limit:
        raise _nonsense(f"{value} is over {limit}", where)


def _nonsense(message: str, where: str) -> InputError:
    return InputError(message, field=where, remedy="the last good report stays in force; look into the island's log")
