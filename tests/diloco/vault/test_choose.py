"""Which generation a rank goes on from: the newest that is whole and that all ranks have; no other is read for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.vault.file import VaultFile
from diloco.vault.layout import Generation
from diloco.vault.restore import Choice, choose
from diloco.vault.snapshots import Identity
from tests.diloco.vault.test_file import NEEDS, RECORD_BYTES, write

IDENTITY = Identity(run_id="", instance="", slot=1, rank=0, num_ranks=1, model="m")


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[VaultFile]:
    with VaultFile.create(tmp_path / "a.vault", NEEDS, record_bytes=RECORD_BYTES) as made:
        write(made, 1, hot=b"1" * 5000, base=b"g" * 80)
        write(made, 2, hot=b"2" * 5000, base=b"h" * 80)
        yield made


def corrupt(vault: VaultFile, generation: Generation) -> None:
    view = vault.view(generation.part("hot"))
    view[100] ^= 1


def chosen(
    vault: VaultFile, *, newest_of_all: Callable[[int], int] = lambda number: number, verified: int = 0
) -> tuple[Choice, int | None]:
    choice = choose(vault.path, IDENTITY, epoch=0, newest_of_all=newest_of_all, verified=verified)
    if choice.chosen is None:
        return choice, None
    choice.chosen.vault.close()
    return choice, choice.chosen.generation.number


def test_the_newest_is_taken_and_what_is_older_may_be_damaged(vault: VaultFile) -> None:
    corrupt(vault, vault.generations()[1])
    choice, number = chosen(vault)
    assert (number, choice.refused) == (2, [])
    assert choice.chosen is not None
    assert choice.chosen.is_sure


def test_where_the_newest_is_damaged_the_one_before_is_taken_and_is_not_sure(vault: VaultFile) -> None:
    corrupt(vault, vault.generations()[0])
    choice, number = chosen(vault)
    assert number == 1
    assert choice.chosen is not None
    assert not choice.chosen.is_sure
    assert len(choice.refused) == 1
    assert "generation 2" in choice.refused[0]


@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
def test_where_another_rank_has_only_the_older_one_that_is_taken_if_it_is_whole(
    vault: VaultFile, is_damaged: bool
) -> None:
    if is_damaged:
        corrupt(vault, vault.generations()[1])
    choice, number = chosen(vault, newest_of_all=lambda number: min(number, 1))
    assert number == (None if is_damaged else 1)
    if not is_damaged:
        assert choice.chosen is not None
        assert choice.chosen.is_sure
    else:
        assert any("generation 1" in reason for reason in choice.refused)


@pytest.mark.parametrize(("verified", "expected"), [(2, 2), (1, 1), (0, 1)], ids=["newest", "older", "none"])
def test_only_what_was_digested_a_moment_ago_is_not_again(vault: VaultFile, verified: int, expected: int) -> None:
    corrupt(vault, vault.generations()[0])
    _, number = chosen(vault, verified=verified)
    assert number == expected


def test_what_was_digested_a_moment_ago_must_still_be_this_slots(vault: VaultFile) -> None:
    choice = choose(
        vault.path,
        Identity(run_id="", instance="", slot=2, rank=0, num_ranks=1, model="m"),
        epoch=0,
        newest_of_all=lambda number: number,
        verified=2,
    )
    assert choice.chosen is None
    assert any("of slot 1, this is 2" in reason for reason in choice.refused)
