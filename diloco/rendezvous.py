"""Where a rank worker finds the other ranks of its island."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import torch

from diloco.group import open_group
from diloco.http_store import HttpStore
from diloco.protocol import GroupPlace, WorkerConfig
from diloco.team import RankTeam
from service.errors import InputError


@contextmanager
def team_of(config: WorkerConfig, device: torch.device, *, cancelled: threading.Event) -> Iterator[RankTeam]:
    """The team of an island with several ranks, which has not met yet; ``cancelled`` ends the wait for the others.

    On a GPU, ``device``, gradients and parameters go over NCCL.

    Raises:
        InputError: the configuration does not say where they meet.
    """
    place = config.group
    if place is None:
        raise InputError("is missing", field="group", remedy="say where the ranks meet")
    with open_store_client(place) as http:
        store = HttpStore(http, group=place.name, epoch=place.epoch, timeout_s=place.timeout_s, cancelled=cancelled)
        meet = partial(
            open_group,
            store,
            rank=config.rank,
            num_ranks=config.num_ranks,
            timeout_s=place.timeout_s,
            device=device,
            # A sum's threads must not take the server's core either.
            idle=config.idle_priority,
        )
        team = RankTeam(
            meet,
            rank=config.rank,
            num_ranks=config.num_ranks,
            is_gated=config.gate is not None,
            shards_optimizer=config.shard_optimizer,
        )
        try:
            yield team
        finally:
            team.close()


def open_store_client(place: GroupPlace) -> httpx.Client:
    headers = {"Authorization": f"Bearer {place.store_token.get_secret_value()}"}
    return httpx.Client(base_url=place.store_url, headers=headers, trust_env=False)
