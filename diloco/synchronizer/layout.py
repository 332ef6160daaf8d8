"""Where the fragments of a run lie: one fragment in the run's directory itself, several in folders below it.

The folders of a run that begins appear under their final name all at once, when each holds its first generation: a run
has all of its fragments or none. Where several synchronizers share a run (`diloco.sharding`), these are the fragments
that live here, whatever their number, and beside them lies what is known of the whole (`shard_file`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.fragment import num_elements
from diloco.schema import Manifest
from diloco.synchronizer.generation import PREFIX, Generation, Outcome, write_generation
from diloco.synchronizer.shard_file import SHARD_FILE, ShardRecord, write_shard
from diloco.synchronizer.storage import FRAGMENTS, sync_folder
from service.errors import ConfigError

UNFINISHED = f"{FRAGMENTS}.new"


class Begun(NamedTuple):
    """A fragment at its beginning."""

    generation: Generation
    parameters: Tensor  # (parameters of the fragment,) fp32
    momentum: Tensor


def folder_of(directory: Path, fragment: int, num_fragments: int) -> Path:
    if num_fragments == 1:
        return directory
    return directory / FRAGMENTS / _name(fragment, num_fragments)


def count_fragments(directory: Path) -> int:
    """How many fragments the run in the directory has, also one that has yet to begin: 1.

    Raises:
        ConfigError: the folder of one is missing, or there is another run beside them.
    """
    parent = directory / FRAGMENTS
    if not parent.is_dir():
        return 1
    found = {path.name for path in parent.iterdir()}
    if SHARD_FILE in found:
        raise ConfigError(
            f"{directory} holds one of several shards of a run",
            field="shard",
            remedy=f"give the --shard that its {FRAGMENTS}/{SHARD_FILE} names, or another --directory",
        )
    number = max((_total(name) for name in found), default=0)
    missing = [name for name in (_name(index, number) for index in range(number)) if name not in found]
    if missing or number < 2:
        what = missing[0] if missing else "all"
        raise ConfigError(
            f"{parent} lacks the fragments' folder {what}",
            field="directory",
            remedy="restore it from a backup, or choose another --directory",
        )
    if any(directory.glob(f"{PREFIX}*")):
        raise ConfigError(
            f"{directory} holds a run of one fragment and one of {number}",
            field="directory",
            remedy=f"move away its {PREFIX}* files or its folder {FRAGMENTS}, whichever is the other run's",
        )
    return number


def begin_fragments(
    directory: Path,
    manifests: Sequence[Manifest],
    parameters: Tensor,
    *,
    outcome: Outcome,
    record: ShardRecord | None = None,
) -> list[Begun]:
    """Write the first generation of every fragment; ``parameters`` are those of all, one after another.

    With ``record`` they are the fragments of that shard.

    Raises:
        OSError: it cannot be written; then no fragment has begun.
    """
    parts = torch.split(parameters, [num_elements(manifest.tensors) for manifest in manifests])
    number = len(manifests) if record is None else record.num_fragments
    own = range(number) if record is None else record.shard.fragments_of(number)
    if number == 1:
        return [_begin(directory, manifests[0], parts[0], outcome)]
    unfinished = directory / UNFINISHED
    for leftover in (unfinished, directory / FRAGMENTS):
        # The second where it appeared, and the disk failed before that was sure.
        if leftover.exists():
            shutil.rmtree(leftover)
    begun = []
    for index, manifest, part in zip(own, manifests, parts, strict=True):
        folder = unfinished / _name(index, number)
        folder.mkdir(parents=True)
        begun.append(_begin(folder, manifest, part, outcome))
    if record is not None:
        write_shard(unfinished, record)
    sync_folder(unfinished)
    unfinished.replace(directory / FRAGMENTS)
    sync_folder(directory)
    return [
        fragment._replace(generation=_moved(fragment.generation, folder_of(directory, index, number)))
        for index, fragment in zip(own, begun, strict=True)
    ]


def _begin(folder: Path, manifest: Manifest, parameters: Tensor, outcome: Outcome) -> Begun:
    momentum = torch.zeros_like(parameters)
    generation = write_generation(folder, 0, manifest, parameters, momentum, outcome=outcome)
    return Begun(generation, parameters, momentum)


def _moved(generation: Generation, folder: Path) -> Generation:
    return replace(generation, path=folder / generation.path.name)


def _name(fragment: int, num_fragments: int) -> str:
    return f"{fragment:04d}-of-{num_fragments:04d}"


def _total(name: str) -> int:
    """The number of fragments that a folder's name says; 0 where it is none of them."""
    index, of, total = name.partition("-of-")
    return int(total) if of and index.isdigit() and total.isdigit() else 0
