"""What an agent tells a worker of a vault that was a replica a moment ago."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from diloco.agent.vaults import Vaults
from diloco.schema import Rung
from diloco.vault.file import VaultFile
from tests.diloco.vault.test_file import NEEDS, RECORD_BYTES, write


def replica(path: Path) -> Path:
    with VaultFile.create(path, NEEDS, record_bytes=RECORD_BYTES) as made:
        write(made, 7, hot=b"1" * 5000, base=b"g" * 80)
    return path


def test_a_replica_that_was_digested_is_trusted_until_a_worker_was_at_it(tmp_path: Path) -> None:
    vaults = Vaults(tmp_path, identity="a", num_ranks=1, instance="i")
    vaults.take_slot(1, adopt=False, run_id="r")
    vaults.install({0: replica(tmp_path / "replica.vault")}, verified=7)
    (place,) = vaults.places(run_id="r", epoch=1, restore=True)
    assert (place.rung, place.is_own, place.verified) == (Rung.REPLICA, False, 7)
    vaults.distrust()
    assert vaults.places(run_id="r", epoch=1, restore=True)[0].verified == 0
    vaults.install({0: replica(tmp_path / "replica.vault")}, verified=7)
    vaults.drop_files()
    assert vaults.places(run_id="r", epoch=1, restore=True)[0].verified == 0
    vaults.drop()


def test_all_ranks_number_their_generations_alike_however_long_it_takes_to_tell_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1e9, 1.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    vaults = Vaults(tmp_path, identity="a", num_ranks=3, instance="i")
    first = {place.first_number for place in vaults.places(run_id="r", epoch=1, restore=True)}
    again = {place.first_number for place in vaults.places(run_id="r", epoch=1, restore=True)}
    assert (len(first), len(again)) == (1, 1)
    assert max(again) > max(first)
