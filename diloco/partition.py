"""How the parameters of a model are cut into fragments that sync one at a time. Pure: no torch, no clock, no IO.

Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512) syncs parts of the model in turn, so that the peak of the
traffic falls to that of one part. Here a fragment is a run of whole tensors that follow one another in wire order:

* its bytes are a slice of the whole model's, so that nothing is copied or reordered on either side;
* the number of tensors in each fragment says all of the partition, so that two of them are compared by a few numbers;
* names group by layer, so that a fragment is a stack of neighbouring layers (the paper's sequential pattern; it found
  the strided one better for the overlap of computation and transfer inside one step, which does not happen here, and no
  difference in what is learned).

Of all such cuts the one with the smallest largest fragment is taken: the peak is what fragments are for. It is at most
an even share and the largest tensor. Every fragment has elements; tensors without any go with their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

from diloco.errors import ManifestError
from diloco.schema import Manifest
from service.errors import InputError


def cut(manifest: Manifest, num_fragments: int) -> tuple[Manifest, ...]:
    """The manifests of the fragments, in order; one after another they are the manifest.

    Raises:
        InputError: there are fewer tensors with elements than fragments.
    """
    sizes = [prod(spec.shape) for spec in manifest.tensors]
    most = sum(size > 0 for size in sizes)
    if not 1 <= num_fragments <= most:
        raise InputError(
            f"{num_fragments} fragments cannot be made of {most} tensors, of which each stays whole",
            field="num_fragments",
            remedy=f"give --num-fragments from 1 to {most}",
        )
    counts = _fill(sizes, num_fragments, _smallest_limit(sizes, num_fragments))
    ends = [0, *accumulate(counts)]
    return tuple(Manifest(tensors=manifest.tensors[start:stop]) for start, stop in pairwise(ends))


def joined(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest that was cut into these."""
    if len(manifests) == 1:
        return manifests[0]
    return Manifest(tensors=tuple(spec for manifest in manifests for spec in manifest.tensors))


def first_cut_difference(ours: Sequence[Manifest], theirs: Sequence[int]) -> str | None:
    """What makes our fragments differ from theirs, of which the numbers of tensors are known, in the same model."""
    if len(ours) != len(theirs):
        return f"it has {_plural(len(theirs), 'fragment')} against {len(ours)} here"
    for index, (mine, num_tensors) in enumerate(zip(ours, theirs, strict=True)):
        if len(mine.tensors) != num_tensors:
            return f"fragment {index} has {_plural(num_tensors, 'tensor')} against {len(mine.tensors)} here"
    return None


def check_fragments(ours: Sequence[Manifest], theirs: Sequence[int]) -> None:
    """Refuse to be in a run that cuts the same model in another way; its fragments have ``theirs`` tensors.

    Raises:
        ManifestError: naming the first difference.
    """
    difference = first_cut_difference(ours, theirs)
    if difference is not None:
        raise ManifestError(
            f"the run cuts the model in another way: {difference}",
            field="num_fragments",
            remedy=f"give --num-fragments {len(theirs)}, or a new run to a synchronizer with another --directory",
        )


def _smallest_limit(sizes: Sequence[int], num_fragments: int) -> int:
    """The least size that no fragment of the best cut is over."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, num_fragments, middle)) <= num_fragments:
            high = middle
        else:
            low = middle + 1
    return low


def _fill(sizes: Sequence[int], num_fragments: int, limit: int) -> list[int]:
    """Numbers of tensors in fragments of at most ``limit`` elements, filled in order: as many as are needed.

    Where fewer would do, one more is begun as late as possible, so that there are ``num_fragments``.
    """
    counts: list[int] = []
    in_last, left = 0, sum(size > 0 for size in sizes)
    for size in sizes:
        is_full = in_last + size > limit
        is_needed = size > 0 and in_last > 0 and left <= num_fragments - len(counts)
        if not counts or is_full or is_needed:
            counts.append(0)
            in_last = 0
        counts[-1] += 1
        in_last += size
        left -= size > 0
    return counts


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
