"""Which fragments live on which of several synchronizers. Pure.

With S synchronizers fragment f of F lives on synchronizer f mod S. All islands know F and S, so all know the same.
Fragments are cut to be of much the same size (`diloco.partition`), so that their bytes are spread evenly too. Rounds
take fragments in turn (`diloco.turns`): neighbouring ones, which may overlap, are on different synchronizers.

A synchronizer's fragments keep the numbers that they have in the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from diloco.digest import sha256
from diloco.schema import MAX_FRAGMENTS, Manifest
from service.errors import InputError

SHARD = re.compile(r"(\d{1,4})/(\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SynchronizerShard:
    """One of the several synchronizers of a run."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``INDEX/COUNT``.

        Raises:
            ValueError: it is not of that form; says how it is written.
        """
        match = SHARD.fullmatch(text.strip())
        index, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not (0 <= index < count and 2 <= count <= MAX_FRAGMENTS):
            raise ValueError("write INDEX/COUNT, counted from 0: 0/2 and 1/2 for two synchronizers")
        return cls(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def owns(self, fragment: int) -> bool:
        return fragment % self.count == self.index

    def fragments_of(self, num_fragments: int) -> tuple[int, ...]:
        """The fragments that live here, of so many."""
        return tuple(range(self.index, num_fragments, self.count))


def check_shards(num_fragments: int, num_synchronizers: int) -> None:
    """Raises `InputError` when there are fewer fragments than synchronizers: one would have nothing to hold."""
    if num_fragments < num_synchronizers:
        raise InputError(
            f"there are {num_synchronizers}, each of which holds fragments of its own, and the run has {num_fragments}",
            field="synchronizer",
            remedy=f"give --num-fragments {num_synchronizers} or more (``fragments`` of a `diloco.Island`), or fewer"
            " synchronizers",
        )


def origin_of(manifest: Manifest, num_fragments: int, *parameters: bytes | memoryview) -> str:
    """What a run begins from, as one number (hex): model, fragments and initial parameters, which follow one another.

    Synchronizers that began from different parameters are not of one run, though their models are the same.
    """
    return sha256(f"{num_fragments} {manifest.model_dump_json()}".encode(), *parameters).hex()
