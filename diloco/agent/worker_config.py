"""What a rank worker is told at its start, from what the agent knows."""

from __future__ import annotations

from typing import Any

from diloco.agent.config import IslandSettings
from diloco.agent.rendezvous import RankStore
from diloco.agent.rules import rank_cores, rank_threads, request_timeout_s
from diloco.agent.state import AgentState, Assignment
from diloco.parked_config import ParkedConfig
from diloco.protocol import GroupPlace, VaultPlace, WorkerConfig


def worker_config(
    settings: IslandSettings,
    state: AgentState,
    assignment: Assignment,
    *,
    rank: int,
    store: RankStore | None,
    group_epoch: int,
    vault: VaultPlace | None,
) -> WorkerConfig:
    """For one rank; several meet over ``store``, at ``group_epoch``."""
    progress, lease = state.progress, state.limits_lease
    chosen = from_settings(settings, rank) | {
        "slot": assignment.slot,
        "group": group_place(settings, state, assignment, store, group_epoch),
        "vault": vault,
        "synchronizer_url": assignment.synchronizer_url,
        "timeout_s": request_timeout_s(settings.request_timeout_s, lease),
        "num_fragments": settings.num_fragments if lease is None else lease.num_fragments,
        "start_step": progress.step,
        "start_tokens": progress.tokens,
        "start_skipped": progress.skipped_steps,
    }
    return WorkerConfig.model_validate(chosen)


def from_settings(settings: IslandSettings, rank: int) -> dict[str, Any]:
    """What the settings alone say: those that go by the same name, and the rank's share of the host."""
    same = WorkerConfig.model_fields.keys() & IslandSettings.model_fields.keys() - {"vault"}
    return {name: getattr(settings, name) for name in same} | {
        "rank": rank,
        "num_ranks": settings.ranks,
        "cores": rank_cores(settings.cores, rank=rank, num_ranks=settings.ranks),
        "threads": rank_threads(settings.threads, rank=rank, num_ranks=settings.ranks),
    }


def parked_configs(settings: IslandSettings, state: AgentState) -> list[ParkedConfig]:
    """One per rank, while the agent waits for a slot; none where nobody says yet what to wait for."""
    lease = state.lease
    url = settings.synchronizer or (lease.synchronizer_url if lease is not None else None)
    if not settings.park or lease is None or lease.slot is not None or url is None:
        return []
    nowhere = Assignment(slot=0, synchronizer_url=url)
    return [
        ParkedConfig(
            config=worker_config(settings, state, nowhere, rank=rank, store=None, group_epoch=0, vault=None),
            refresh_s=settings.park_refresh_s,
        )
        for rank in range(settings.ranks)
    ]


def group_place(
    settings: IslandSettings, state: AgentState, assignment: Assignment, store: RankStore | None, epoch: int
) -> GroupPlace | None:
    """Where the ranks meet; None of one alone."""
    if store is None:
        return None
    return GroupPlace(
        store_url=store.url,
        store_token=store.token,
        name=f"{state.instance}/slot-{assignment.slot}",
        epoch=epoch,
        timeout_s=settings.group_timeout_s,
    )
