"""The agent's decisions, without clock or IO: when to restart, which directives count, when to sync untold."""

from __future__ import annotations

from dataclasses import dataclass

from controller.schema import AgentLease, Autonomy, Directive
from diloco.protocol import SyncCommand
from diloco.schema import DEFAULT_SYNC_TIMEOUT_S, Phase, Progress, SyncTimes
from diloco.turns import place_of

MAX_H_WITHOUT_LEASE = 512
"""H of an island that no controller has told its limits; the published setting."""
LEASE_TIMEOUT_WITHOUT_LEASE_S = 10.0
SETTLED_AFTER_S = 60.0
"""A worker that lived so long was healthy: its death starts a new count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an island needs to know to sync by itself."""

    max_h: int
    lease_timeout_s: float
    autonomy: Autonomy


@dataclass(frozen=True, slots=True, kw_only=True)
class Solitude:
    """How long and how far an island has been alone."""

    silent_s: float
    """Since the controller's last answer."""
    syncs: int
    """Begun without it since then."""
    since_last_sync_s: float | None


def limits_of(lease: AgentLease | None) -> Limits:
    if lease is None:
        return Limits(max_h=MAX_H_WITHOUT_LEASE, lease_timeout_s=LEASE_TIMEOUT_WITHOUT_LEASE_S, autonomy=Autonomy())
    return Limits(max_h=lease.max_h, lease_timeout_s=lease.lease_timeout_s, autonomy=lease.autonomy)


def autonomous_sync_due(limits: Limits, alone: Solitude, *, progress: Progress, in_flight: bool, now_s: float) -> bool:
    """Whether to sync untold: no controller for as long as a lease lasts, H at its maximum, and budget left."""
    autonomy = limits.autonomy
    return (
        autonomy.allowed
        and not in_flight
        and progress.phase is Phase.INNER
        and alone.silent_s > limits.lease_timeout_s
        and progress.inner_steps_since_sync >= limits.max_h
        and (autonomy.max_syncs is None or alone.syncs < autonomy.max_syncs)
        and (autonomy.until_s is None or now_s < autonomy.until_s)
        and (alone.since_last_sync_s is None or alone.since_last_sync_s >= autonomy.min_gap_s)
    )


def counts(directive: Directive, *, lease_epoch: int, last_seq: int) -> bool:
    """Whether a directive is new and meant for the holder of this lease (others joining raises the epoch, too)."""
    return directive.epoch >= lease_epoch and directive.seq > last_seq


def times_of(lease: AgentLease | None) -> SyncTimes:
    """The deadlines that hold under this lease."""
    return SyncTimes(sync_timeout_s=DEFAULT_SYNC_TIMEOUT_S if lease is None else lease.sync_timeout_s)


def request_timeout_s(configured_s: float, lease: AgentLease | None) -> float:
    """Longest wait for one answer: what is configured, where the deadlines of the lease leave so much."""
    return min(configured_s, times_of(lease).request_s)


def autonomous_command(*, epoch: int, now_s: float, timeout_s: float) -> SyncCommand:
    """A sync that nobody directed: its round closes before those who wait for it give up."""
    times = SyncTimes(sync_timeout_s=timeout_s)
    return SyncCommand(
        epoch=epoch,
        deadline_s=now_s + timeout_s,
        close_by_s=now_s + times.close_s,
        pull_grace_s=times.pull_grace_s,
        autonomous=True,
    )


def sync_command(directive: Directive, times: SyncTimes, *, epoch: int, now_s: float) -> SyncCommand:
    """What the worker has to do for a sync directive; ``epoch`` is the newest heard of."""
    return SyncCommand(
        round=directive.round,
        quorum=directive.quorum,
        expected=directive.expected,
        # A controller that lost its journal counts from 0 again, and the synchronizer fences lower epochs.
        epoch=max(epoch, directive.epoch),
        not_before_s=directive.not_before_s,
        deadline_s=directive.deadline_s if directive.deadline_s is not None else now_s + times.sync_timeout_s,
        close_by_s=directive.close_by_s,
        pull_grace_s=times.pull_grace_s,
        overlap=directive.overlap,
    )


def refused_fragments(directive: Directive, lease: AgentLease | None, *, num_fragments: int | None) -> str | None:
    """Why a sync is not for a run of so many fragments; None when it is, or nobody knows how many there are yet."""
    if num_fragments is None:
        return None
    wanted = num_fragments if lease is None else lease.num_fragments
    due = directive.fragments if directive.round is None else (place_of(directive.round, num_fragments).fragment,)
    if wanted == num_fragments and directive.fragments == due:
        return None
    return (
        f"num_fragments: the run has {num_fragments}, the controller directs {directive.fragments} of {wanted} in round"
        f" {directive.round}: start it with --num-fragments {num_fragments}"
    )


def backoff_s(attempt: int, *, first_s: float, longest_s: float) -> float:
    """Pause before the ``attempt``-th repetition, counted from 1: doubles up to ``longest_s``."""
    return min(longest_s, first_s * 2.0 ** min(attempt - 1, 62))


def rank_cores(cores: tuple[int, ...], *, rank: int, num_ranks: int) -> tuple[int, ...]:
    """A rank's share of the cores; all of them (none named) where they are too few to share."""
    return cores[rank::num_ranks] if len(cores) >= num_ranks else cores


def rank_threads(threads: int, *, rank: int, num_ranks: int) -> int:
    """A rank's share of the threads, at least one; what cannot be divided goes to the first ranks."""
    return max(1, threads // num_ranks + (rank < threads % num_ranks))


def deaths_in_a_row(before: int, *, lived_s: float, got_further: bool = False) -> int:
    """Deaths in quick succession, after a worker died that had lived for ``lived_s``.

    One that ``got_further`` than all before it did not die of what they died of.
    """
    return 1 if lived_s >= SETTLED_AFTER_S or got_further else before + 1
