"""Which reports of an island cannot be true. Pure; the wire models have already refused what is not a finite number.

What is believed once is what later reports are judged by, and what the next holder of the slot goes on from. Hence:

* A process is held to its own word only. What another one said bounds how far ahead it may be, never how far behind.
* A count grows at most by ``at once + per second * elapsed``: far more than any hardware does, far less than nonsense.
* A count that nothing is known about must be below a hundredth of its limit, and progress is handed on only below a
  tenth (`can_go_on`): whoever goes on from it is never near a limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.schema import Heartbeat
from diloco.schema import Phase, Progress, Restart, SyncReport
from service.errors import InputError

# The fastest step of the smallest model takes 10 µs. The share "at once" is for heartbeats that were held up.
STEPS_PER_S = 10**5
STEPS_AT_ONCE = 10**6
MAX_TOKENS_PER_STEP = 10**9
RESTARTS_PER_S = 10
RESTARTS_AT_ONCE = 100
# An outer step moves the whole model.
ROUNDS_PER_S = 10
ROUNDS_AT_ONCE = 10
# For an island that nothing is known about, and when no version is known either.
MAX_ROUND_JUMP = 10_000
MAX_FIRST_ROUND = 10**6

# Far beyond any run, far below what would overflow a sum or a chart.
LIMITS = {"step": 10**12, "tokens": 10**18, "restarts": 10**6}
FIRST_SHARE = 100
HANDED_ON_SHARE = 10

MAX_SYNC_STEPS = 10**10
MAX_BYTES = 10**18
MAX_LOSS = 1e6
MAX_NORM = 1e30
MAX_STEP_TIME_S = 1e5
# Skipped steps are steps; a worker that starts again may know of more than its position says.
SKIPPED_SLACK = 10**6
# Clocks of hosts may differ by this much.
CLOCK_TOLERANCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Progress that was believed, and when it was told by the controller's clock (None: not known any more)."""

    progress: Progress
    told_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a heartbeat is judged by."""

    own: Claim | None = None
    """The last word of the same process under the same lease."""
    slot: Claim | None = None
    """How far the slot had come before."""
    version: int = 0
    """Highest version of the global parameters that anybody has told."""
    version_told_s: float | None = None
    """When that was told last; None: not by anybody who is known."""


def can_go_on(progress: Progress) -> bool:
    """Whether the next holder of a slot may start from this: its own reports will stay far from every limit."""
    return all(getattr(progress, name) * HANDED_ON_SHARE <= limit for name, limit in LIMITS.items())


def check_heartbeat(beat: Heartbeat, known: Known, *, now_s: float) -> None:
    """Refuse a heartbeat that contradicts itself, what the same process said before, or what hardware can do.

    Raises:
        InputError: naming the field.
    """
    if beat.progress is not None:
        _check_alone(beat.progress, now_s)
        _check_round(beat.progress.round, "progress.round", known, now_s)
        if known.own is not None:
            _check_own_word(beat.progress, known.own.progress)
        _check_growth(beat.progress, known, now_s)
    for index, report in enumerate(beat.syncs):
        _check_sync(report, f"syncs.{index}", known, now_s)
    for index, restart in enumerate(beat.restarts):
        _check_restart(restart, f"restarts.{index}", now_s)


def _check_alone(progress: Progress, now_s: float) -> None:
    """What can be seen from the report alone."""
    for name, limit in LIMITS.items():
        _at_most(getattr(progress, name), limit, f"progress.{name}")
    _at_most(progress.tokens, MAX_TOKENS_PER_STEP * (progress.step + 1), "progress.tokens")
    _at_most(progress.inner_steps_since_sync, progress.step, "progress.inner_steps_since_sync")
    _at_most(progress.tokens_since_sync, progress.tokens, "progress.tokens_since_sync")
    _at_most(progress.skipped_steps, progress.step + SKIPPED_SLACK, "progress.skipped_steps")
    _at_most(progress.step_time_s, MAX_STEP_TIME_S, "progress.step_time_s")
    _at_most(progress.update_norm, MAX_NORM, "progress.update_norm")
    _at_most(progress.residual_norm, MAX_NORM, "progress.residual_norm")
    _not_in_future(progress.last_sync_at_s, "progress.last_sync_at_s", now_s)
    for name in ("loss", "loss_at_sync"):
        loss = getattr(progress, name)
        if loss is not None and abs(loss) > MAX_LOSS:
            raise _nonsense(f"{loss:g} is no training loss", f"progress.{name}")


def _check_own_word(progress: Progress, last: Progress) -> None:
    if progress.restarts < last.restarts:
        raise _nonsense(f"went back from {last.restarts} to {progress.restarts}", "progress.restarts")
    if progress.restarts == last.restarts and progress.step < last.step:
        raise _nonsense(f"went back from {last.step} to {progress.step} without a restart", "progress.step")


def _check_growth(progress: Progress, known: Known, now_s: float) -> None:
    base = known.own or known.slot
    if base is None or base.told_s is None:
        for name, limit in LIMITS.items():
            before = 0 if base is None else getattr(base.progress, name)
            _at_most(getattr(progress, name), before + limit // FIRST_SHARE, f"progress.{name}")
        return
    elapsed_s = max(0.0, now_s - base.told_s)
    steps = STEPS_AT_ONCE + int(STEPS_PER_S * elapsed_s)
    _at_most(progress.step, base.progress.step + steps, "progress.step")
    _at_most(progress.tokens, base.progress.tokens + MAX_TOKENS_PER_STEP * steps, "progress.tokens")
    # Restarts are those of the process, not of the slot.
    before, restarts = 0, LIMITS["restarts"] // FIRST_SHARE
    if known.own is not None:
        before, restarts = known.own.progress.restarts, RESTARTS_AT_ONCE + int(RESTARTS_PER_S * elapsed_s)
    _at_most(progress.restarts, before + restarts, "progress.restarts")


def _check_sync(report: SyncReport, where: str, known: Known, now_s: float) -> None:
    _check_round(report.round, f"{where}.round", known, now_s)
    if report.staleness and report.staleness_weight is None:
        raise _nonsense(f"{report.staleness} versions behind, and taken in by nobody", f"{where}.staleness")
    _at_most(report.inner_steps, MAX_SYNC_STEPS, f"{where}.inner_steps")
    _at_most(report.tokens, MAX_TOKENS_PER_STEP * (report.inner_steps + 1), f"{where}.tokens")
    _at_most(report.bytes_pushed, MAX_BYTES, f"{where}.bytes_pushed")
    _at_most(report.bytes_pulled, MAX_BYTES, f"{where}.bytes_pulled")
    _at_most(report.update_norm, MAX_NORM, f"{where}.update_norm")
    if report.finished_s < report.started_s:
        raise _nonsense("ends before it starts", f"{where}.finished_s")
    _at_most(report.blocked_s, report.finished_s - report.started_s + CLOCK_TOLERANCE_S, f"{where}.blocked_s")
    _not_in_future(report.pushed_s, f"{where}.pushed_s", now_s)
    _not_in_future(report.finished_s, f"{where}.finished_s", now_s)


def _check_restart(restart: Restart, where: str, now_s: float) -> None:
    for name in ("from_step", "steps_repeated", "steps_lost"):
        _at_most(getattr(restart, name), LIMITS["step"], f"{where}.{name}")
    _not_in_future(restart.detected_s, f"{where}.detected_s", now_s)
    _not_in_future(restart.first_step_s, f"{where}.first_step_s", now_s)


def _check_round(round_: int, where: str, known: Known, now_s: float) -> None:
    jump = _round_jump(known, now_s)
    if round_ > known.version + jump:
        raise _nonsense(f"{round_} is far ahead of the run's {known.version}", where)


def _round_jump(known: Known, now_s: float) -> int:
    """How far ahead of the run's version an island may be: by what others did since it, or anybody, spoke last."""
    for claim in (known.own, known.slot):
        # A worker that starts does not know the version yet.
        if claim is not None and claim.told_s is not None and claim.progress.phase is not Phase.STARTING:
            return _rounds_since(claim.told_s, now_s)
    if known.version_told_s is not None:
        return _rounds_since(known.version_told_s, now_s)
    return MAX_ROUND_JUMP if known.version > 0 else MAX_FIRST_ROUND


def _rounds_since(told_s: float, now_s: float) -> int:
    return ROUNDS_AT_ONCE + int(ROUNDS_PER_S * max(0.0, now_s - told_s))


def _at_most(value: float | None, limit: float, where: str) -> None:
    if value is not None and value > limit:
        raise _nonsense(f"{value} is over {limit}, which cannot be", where)


def _not_in_future(unix_s: float | None, where: str, now_s: float) -> None:
    if unix_s is not None and unix_s > now_s + CLOCK_TOLERANCE_S:
        raise _nonsense("lies in the future", where)


def _nonsense(message: str, where: str) -> InputError:
    return InputError(message, field=where, remedy="the last good report stays in force; look into the island's log")
