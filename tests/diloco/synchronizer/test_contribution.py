"""Contributions on disk: an intact one of the open round comes back, everything else goes away."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.synchronizer.contribution import (
    Accepted,
    accept_contribution,
    begin_contribution,
    recover_contributions,
    verify_contribution,
)
from diloco.synchronizer.rounds import Claim
from diloco.synchronizer.upload import Chunk

LOCAL = torch.arange(8.0)


def accept(
    directory: Path, *, round_number: int = 3, slot: int = 0, local: Tensor = LOCAL, into: int | None = None
) -> Accepted:
    data = bytes(wire_bytes(local))
    claim = Claim(round=round_number, slot=slot, epoch=2, tokens=9, quorum=2, expected=3, closes_in_s=4.5)
    chunk = Chunk(start=0, total=len(data), digest=sha256(data), data=data)
    upload = begin_contribution(directory, claim, chunk)
    upload.append(chunk)
    assert verify_contribution(upload, torch.zeros_like(local))
    return accept_contribution(directory, claim, upload, into=round_number if into is None else into)


def recover(directory: Path) -> list[Accepted]:
    return list(recover_contributions(directory, round_number=3, num_values=8, bases={2, 3}))


def test_an_accepted_contribution_comes_back_whole(tmp_path: Path) -> None:
    written = [accept(tmp_path, slot=slot) for slot in (0, 5)]
    assert recover(tmp_path) == written
    assert torch.equal(written[1].payload().view(torch.float32), LOCAL)


def test_what_a_contribution_said_of_its_round_comes_back(tmp_path: Path) -> None:
    accept(tmp_path)
    (found,) = recover(tmp_path)
    assert (found.claim.quorum, found.claim.expected, found.claim.closes_in_s) == (2, 3, 4.5)


def test_a_stale_contribution_comes_back_into_the_round_that_took_it(tmp_path: Path) -> None:
    written = accept(tmp_path, round_number=2, into=3)
    assert recover(tmp_path) == [written]
    assert written.staleness == 1


def test_a_contribution_against_parameters_that_are_lost_is_removed_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accept(tmp_path, round_number=1, into=3)
    assert recover(tmp_path) == []
    assert "is against a generation that is lost" in caplog.text


def test_contributions_to_other_rounds_and_models_are_removed(tmp_path: Path) -> None:
    accept(tmp_path, round_number=2)
    accept(tmp_path, round_number=4)
    accept(tmp_path, slot=1, local=torch.zeros(9))
    assert recover(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("position", [*range(0, 330, 11), -1])
def test_a_damaged_contribution_is_removed(tmp_path: Path, position: int) -> None:
    path = accept(tmp_path).path
    data = bytearray(path.read_bytes())
    data[position] ^= 0x55
    path.write_bytes(data)
    assert recover(tmp_path) == []
    assert not path.exists()
