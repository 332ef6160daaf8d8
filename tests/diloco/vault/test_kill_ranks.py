"""Two ranks of one island, of which either is killed: both go on from the newest snapshot that both have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from diloco.protocol import GroupPlace
from diloco.schema import Rung
from tests.diloco.vault.conftest import Slot, StartSlot, syncs_at, until_version

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]

Serve = Callable[..., str]
STEPS = (60, 130)
NUM_RANKS = 2


def place(store_url: str, name: str, epoch: int) -> GroupPlace:
    return GroupPlace(store_url=store_url, store_token=SecretStr("x"), name=name, epoch=epoch, timeout_s=60.0)


def begun(start_slot: StartSlot, url: str, store_url: str, name: str) -> list[Slot]:
    ranks = [
        start_slot(
            url,
            name=f"{name}-{rank}",
            rank=rank,
            num_ranks=NUM_RANKS,
            shard_optimizer=True,
            codec="int4",
            group=place(store_url, name, 1),
        )
        for rank in range(NUM_RANKS)
    ]
    ranks[0].plan(*syncs_at(*STEPS))
    for rank in ranks:
        rank.train()
    return ranks


def test_ranks_that_were_killed_end_with_the_weights_of_those_that_were_not(
    serve: Serve, start_slot: StartSlot, store_url: str, tmp_path: Path
) -> None:
    url = serve(tmp_path / "one", quorum=1)
    begun(start_slot, url, store_url, "undisturbed")
    wanted = until_version(url, len(STEPS))

    url = serve(tmp_path / "two", quorum=1)
    ranks = begun(start_slot, url, store_url, "killed")
    for epoch, (first, step) in enumerate([(1, 5), (0, STEPS[0] + 3)], start=2):
        ranks[0].until_step(step)
        ranks[1].until_step(step)
        for rank in (ranks[first], ranks[1 - first]):
            rank.kill()
        common = {g.number for g in ranks[0].vault.generations()} & {g.number for g in ranks[1].vault.generations()}
        assert common
        for rank in ranks:
            rank.change(group=place(store_url, "killed", epoch))
            rank.begin_again()
        restored = ranks[0].hear_again()
        assert (restored.rung, restored.generation, restored.lost) == (Rung.VAULT, max(common), "")
    assert until_version(url, len(STEPS)) == wanted
