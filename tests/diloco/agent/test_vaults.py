"""What an agent tells a worker of a vault that was a replica a moment ago."""

from __future__ import annotations

from pathlib import Path

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
    place = vaults.place(0, run_id="r", epoch=1, restore=True)
    assert (place.rung, place.is_own, place.verified) == (Rung.REPLICA, False, 7)
    vaults.distrust()
    assert vaults.place(0, run_id="r", epoch=1, restore=True).verified == 0
    vaults.install({0: replica(tmp_path / "replica.vault")}, verified=7)
    vaults.drop_files()
    assert vaults.place(0, run_id="r", epoch=1, restore=True).verified == 0
    vaults.drop()
