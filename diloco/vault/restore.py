"""Which generation of the own vault a rank goes on from, and why not from another.

Of the two in a vault a rank takes the newest whose digests fit. Several ranks take the newest that all of them have:
the lowest of their newest ones, see `diloco.vault.snapshots`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.protocol import WorkerConfig
from diloco.schema import FragmentState
from diloco.vault.errors import CorruptError, ForeignError, VaultError
from diloco.vault.file import VaultFile
from diloco.vault.layout import Generation, ReadRecord
from diloco.vault.members import Held, Member
from diloco.vault.snapshots import WRITER_WAIT_S, Identity


@dataclass(slots=True)
class Chosen:
    """A generation that is whole and fits. Whoever takes it writes to the vault from then on, or closes it."""

    vault: VaultFile
    generation: Generation
    is_sure: bool
    """Every contribution that was pushed is in it: False where a newer generation is lost."""
    begun_s: float
    fetched_s: float
    """Unix times."""


@dataclass(slots=True)
class Choice:
    """What was found, and what was refused."""

    chosen: Chosen | None
    refused: list[str]


def choose(
    path: Path | None, identity: Identity, *, epoch: int, newest_of_all: Callable[[int], int], verified: int = 0
) -> Choice:
    """The newest generation that all ranks have. ``newest_of_all`` is called twice, on every rank.

    The one with the number ``verified`` was digested a moment ago, and is not again; 0: none was.
    """
    begun_s = time.time()
    refused: list[str] = []
    found: dict[int, tuple[Generation, bool]] = {}
    rest: Iterator[tuple[Generation, bool]] = iter(())
    vault: VaultFile | None = None
    if path is not None:
        try:
            vault = VaultFile.open(path, write_within_s=WRITER_WAIT_S)
            rest = _whole(vault, identity, epoch, refused, verified=verified)
            found = _numbered(itertools.islice(rest, 1))
        except VaultError as exc:
            refused.append(str(exc))
    else:
        refused.append("no vault")
    common = newest_of_all(max(found, default=0))
    if common < max(found, default=0):
        found |= _numbered(rest)
    is_there = newest_of_all(int(common in found)) == 1
    if vault is not None and common and is_there:
        generation, is_sure = found[common]
        return Choice(
            Chosen(vault=vault, generation=generation, is_sure=is_sure, begun_s=begun_s, fetched_s=time.time()),
            refused,
        )
    if found:
        refused.append(f"another rank has not generation {max(found)}")
    if vault is not None:
        vault.close()
    return Choice(None, refused or ["the vault is empty"])


def _numbered(found: Iterable[tuple[Generation, bool]]) -> dict[int, tuple[Generation, bool]]:
    return {generation.number: (generation, is_sure) for generation, is_sure in found}


def _whole(
    vault: VaultFile, identity: Identity, epoch: int, refused: list[str], *, verified: int
) -> Iterator[tuple[Generation, bool]]:
    """Those that fit, the newest first, and whether nothing newer was lost. Each is digested when it is asked for."""
    records = vault.records()
    torn = [record for record in records if isinstance(record, CorruptError)]
    refused += [str(record) for record in torn]
    is_newest_lost = bool(torn)
    read = [record for record in records if isinstance(record, ReadRecord)]
    for record in sorted(read, key=lambda record: -record.generation.number):
        try:
            check_identity(record.generation, identity, epoch=epoch)
            if record.generation.number != verified:
                vault.verify(record.generation)
        except VaultError as exc:
            refused.append(str(exc))
            is_newest_lost = True
        else:
            yield record.generation, record.is_sure and not is_newest_lost


def check_identity(generation: Generation, identity: Identity, *, epoch: int) -> None:
    """Raises `ForeignError`: it is that of something else, or of an epoch that is yet to come."""
    for name in ("run_id", "slot", "rank", "num_ranks", "model"):
        its, ours = getattr(generation, name), getattr(identity, name)
        if its != ours:
            raise ForeignError(f"generation {generation.number} is of {name} {its}, this is {ours}", field="vault")
    if generation.epoch > epoch:
        raise ForeignError(
            f"generation {generation.number} is of epoch {generation.epoch}, this is {epoch}", field="vault"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a rank's counters begin."""

    step: int
    tokens: int
    skipped: int


def start_of(config: WorkerConfig, chosen: Chosen | None) -> Start:
    """That of the generation; without one, what the agent knows of the slot."""
    if chosen is None:
        return Start(step=config.start_step, tokens=config.start_tokens, skipped=config.start_skipped)
    generation = chosen.generation
    return Start(step=generation.step, tokens=generation.tokens, skipped=generation.skipped)


def fits_run(member: Member, global_flat: Tensor, run: FragmentState, *, slot: int, is_sure: bool) -> bool:
    """Whether a fragment goes on as restored: at the same global parameters, or where nothing can count twice.

    Sure is a generation that knows of every contribution: one that the run has merged meanwhile is found out by pushing
    it again. Otherwise the run must be where the snapshot was, with no other contribution of the slot in the open
    round, or at the version that the snapshot's own contribution made.
    """
    if run.run is not None and member.run not in {None, run.run}:
        return is_sure  # nothing of it is in that run: the next sync goes over to it with all progress
    if run.version == member.version:
        if run.digest != sha256(wire_bytes(global_flat.contiguous())).hex():
            return False
        return is_sure or not _holds_another(member, run, slot=slot)
    if is_sure or run.version < member.version:
        return True
    accepted = member.accepted
    if accepted is None:
        return False
    into = accepted.round if accepted.into is None else accepted.into
    return run.version == into + 1 == member.version + 1 and not _has_later(member, accepted, run)


def _has_later(member: Member, accepted: Held, run: FragmentState) -> bool:
    """Whether the parameters have a contribution of the slot in them that the snapshot does not know of."""
    applied = run.applied
    is_known = applied is None or accepted.digest is None or applied.digest == accepted.digest
    return not is_known and applied is not None and applied.into >= member.version


def _holds_another(member: Member, run: FragmentState, *, slot: int) -> bool:
    accepted = member.accepted
    known = 0 if accepted is None else max(1, accepted.tokens)
    return any(entry.slot == slot and entry.tokens > known for entry in run.open_round.contributions)
