"""Whether what a synchronizer says of itself is of the run that an island means; errors name the difference. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.errors import ManifestError
from diloco.fragment import first_difference
from diloco.partition import check_fragments
from diloco.schema import Manifest, OuterState
from service.errors import InputError

PLACES_REMEDY = (
    "give the URLs of all synchronizers of the run, in the order of their --shard, with commas between them; one URL"
    " where one has all fragments"
)


def check_model(state: OuterState, manifest: Manifest) -> None:
    """Raises `ManifestError`, which names the first difference, when the run has another model."""
    difference = first_difference(state.manifest, manifest) if state.manifest is not None else None
    if difference is not None:
        raise ManifestError(f"differs from the run's: {difference}", field="manifest", remedy=ManifestError.REMEDY)


def check_cut(state: OuterState, fragments: Sequence[Manifest]) -> None:
    """Raises `ManifestError`, which names the first difference, when the run cuts the same model in another way.

    Of a shard, as far as its own fragments tell.
    """
    told = {fragment.fragment: fragment.num_tensors for fragment in state.fragments}
    if None in told.values():  # by a version that has one fragment, which is all
        told = {0: len(state.manifest.tensors) if state.manifest is not None else 0}
    total = len(told) if state.shard is None else state.shard.num_fragments or 0
    ours = {index: len(fragment.tensors) for index, fragment in enumerate(fragments)}
    check_fragments(fragments, [told.get(index) or ours.get(index, 0) for index in range(total)])


def check_place(state: OuterState, *, url: str, index: int = 0, count: int = 1) -> None:
    """Raises `InputError` when the synchronizer is not that one of so many."""
    found = (0, 1) if state.shard is None else (state.shard.index, state.shard.num_shards)
    if found != (index, count):
        says = "has all fragments of its run" if state.shard is None else f"is shard {found[0]}/{found[1]}"
        given = "the only one" if count == 1 else f"shard {index}/{count}"
        raise InputError(f"{url} {says}, and is given as {given}", field="synchronizer", remedy=PLACES_REMEDY)


def check_origin(state: OuterState, origin: str, *, url: str) -> None:
    """Raises `ManifestError` when a shard's run began from something else than the other shards'."""
    told = None if state.shard is None else state.shard.origin
    if told not in {None, origin}:
        raise ManifestError(
            f"{url} holds another run than the other synchronizers: it began from other parameters, or other fragments",
            field="synchronizer",
            remedy="give it the --directory that belongs to this run, or begin a new run on all of them",
        )
