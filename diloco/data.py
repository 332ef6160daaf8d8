"""Disjoint shards of a data set in a fixed order, with exact resume; and byte tokens of local text files in it.

Sample k belongs to shard k mod ``num_shards``, and an island reads the shard of its slot. At its end the shard begins
anew without a pause: each epoch is a new permutation drawn from (seed, slot, epoch). The position of a stream is the
number of batches drawn, so that continuing from a step is a matter of one number.
A corpus is cut into windows of length + 1 bytes, its samples. Shards are disjoint as long as all islands read the same
files and use the same window length and number of shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diloco.corpus import corpus_files
from service.errors import InputError
from service.files import read_regular

FILE_SEPARATOR = b"\n\n"


def load_corpus(paths: Sequence[Path]) -> Tensor:
    """All bytes of the files (directories: of the text files in them, sorted), uint8; no path: Python's own library.

    Raises:
        InputError: a path that does not exist, cannot be read or holds no text.
    """
    kept = _kept.pop(tuple(paths), None)
    if kept is not None:
        return kept
    corpus = bytearray()
    for file in corpus_files(paths):
        corpus += read_whole(file) + FILE_SEPARATOR
    return torch.frombuffer(corpus, dtype=torch.uint8)


_kept: dict[tuple[Path, ...], Tensor] = {}


def read_ahead(paths: Sequence[Path]) -> None:
    """Read these files now, for the first `load_corpus` of them.

    Raises:
        InputError: as `load_corpus`.
    """
    _kept[tuple(paths)] = load_corpus(paths)


def read_whole(file: Path) -> bytes:
    """The content of a file that nobody changes meanwhile.

    Raises:
        InputError: it cannot be read, or its size changed.
    """
    try:
        num_bytes = file.stat().st_size
        content = read_regular(file)
    except OSError as exc:
        raise InputError(
            f"cannot read {file}: {exc.strerror or exc}", field="data", remedy="restore it, or leave it out"
        ) from exc
    if len(content) != num_bytes:
        raise InputError(
            f"{file} changed while it was read: {len(content)} bytes came, and it had {num_bytes}",
            field="data",
            remedy="start when it is whole: all islands must read the same",
        )
    return content


class ShardOrder:
    """Which samples are in each batch of one shard: an endless iterator over (batch,) numbers, int64."""

    def __init__(
        self, num_samples: int, *, slot: int, num_shards: int, seed: int, batch_size: int, position: int = 0
    ) -> None:
        """Continue at ``position`` batches. The samples that fill no batch are left out, in each epoch others.

        Raises:
            InputError: the slot has no shard, or the shard has less than one batch.
        """
        if slot >= num_shards:
            raise InputError(
                f"slot {slot} has no shard among {num_shards}", field="data_shards", remedy="set more shards than slots"
            )
        self._samples = torch.arange(num_samples)[slot::num_shards]
        self._batches_per_epoch = len(self._samples) // batch_size
        if self._batches_per_epoch == 0:
            raise InputError(
                f"{num_samples} samples are too few: {num_shards} shards need {num_shards * batch_size} for one batch"
                " each",
                field="data",
                remedy="give more data, or lower data_shards or the batch size",
            )
        self._seed = (seed, slot)
        self._batch_size = batch_size
        self.position = position
        self._epoch = -1
        self._order = self._samples

    def state_dict(self) -> dict[str, int]:
        """The position, in batches."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue there."""
        self.position = state_dict["position"]

    def __iter__(self) -> ShardOrder:
        return self

    def __next__(self) -> Tensor:
        epoch, index = divmod(self.position, self._batches_per_epoch)
        if epoch != self._epoch:
            self._order, self._epoch = self._shuffled(epoch), epoch
        self.position += 1
        return self._order[index * self._batch_size : (index + 1) * self._batch_size]

    def _shuffled(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(repr((*self._seed, epoch)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return self._samples[torch.randperm(len(self._samples), generator=generator)]


class TokenStream:
    """Batches of one shard of a corpus, in the order that (seed, slot) stands for."""

    def __init__(
        self,
        corpus: Tensor,
        *,
        slot: int,
        num_shards: int,
        seed: int,
        batch_size: int,
        length: int,
        position: int = 0,
        source: str = "the text",
        unit: str = "bytes",
    ) -> None:
        """Continue at ``position`` batches. Errors call the corpus ``source``, and its tokens ``unit``.

        Raises:
            InputError: the slot has no shard, or the shard has less than one batch.
        """
        windows = corpus.numel() // (length + 1)
        if slot < num_shards and len(range(slot, windows, num_shards)) < batch_size:
            raise InputError(
                f"{corpus.numel()} {unit} are too few in {source}: {num_shards} shards need "
                f"{num_shards * batch_size * (length + 1)} for one batch each, and these make {windows} sequences",
                field="data",
                remedy="give more text, or lower data_shards, batch_size or context",
            )
        self._order = ShardOrder(
            windows, slot=slot, num_shards=num_shards, seed=seed, batch_size=batch_size, position=position
        )
        self._corpus = corpus
        self._length = length

    @property
    def position(self) -> int:
        return self._order.position

    def state_dict(self) -> dict[str, int]:
        """The position, in batches."""
        return self._order.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue there."""
        self._order.load_state_dict(state_dict)

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Tensor:
        return self.next_batch()

    def next_batch(self) -> Tensor:
        """The next (batch, length + 1) tokens, int64."""
        offsets = next(self._order)[:, None] * (self._length + 1) + torch.arange(self._length + 1)
        return self._corpus[offsets].long()


def shown_source(paths: Sequence[Path]) -> str:
    """The corpus in words."""
    return ", ".join(map(str, paths)) or "Python's own library"
