"""The built-in workload: the byte GPT on local text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

from diloco.data import TokenStream, load_corpus, shown_source
from diloco.model import ByteGPT, ModelSize, build_model, next_byte_loss
from diloco.workload import Part, Shard, Workload, rows_of


class ByteText(Workload[Tensor]):
    """Batches are (batch, context + 1) tokens, int64."""

    def __init__(self, size: ModelSize, *, data: Sequence[Path], batch_size: int) -> None:
        """``data``: text files or folders of them; none takes Python's own library."""
        self._size = size
        self._data = data
        self._batch_size = batch_size

    def build_model(self, *, seed: int) -> nn.Module:
        return build_model(self._size, seed=seed)

    def batches(self, shard: Shard, *, position: int) -> TokenStream:
        """The slot's token stream.

        Raises:
            InputError: the data cannot be read, or is too little for so many shards.
        """
        return TokenStream(
            load_corpus(self._data),
            slot=shard.slot,
            num_shards=shard.num_shards,
            seed=shard.seed,
            batch_size=self._batch_size,
            length=self._size.context,
            position=position,
            source=shown_source(self._data),
        )

    def rank_batches(self, shard: Shard, part: Part, *, position: int) -> Iterator[Tensor]:
        """The rank's rows of the batches: however many ranks there are, the island trains on the same."""
        return rows_of(self.batches(shard, position=position), part)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return next_byte_loss(model, batch)

    def count_tokens(self, batch: Tensor) -> int:
        """Those that are predicted."""
        return batch[:, 1:].numel()

    def checkpointed_layers(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, ByteGPT)
        return model.blocks
