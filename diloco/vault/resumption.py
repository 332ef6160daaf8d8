"""How the first rank of an island goes on from a generation: its part of the run, and whether the run agrees."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError
from torch import Tensor

from diloco.island import Capture
from diloco.schema import Count, OuterState
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.transport import SynchronizerClient, check_cut, check_model
from diloco.vault.errors import CorruptError
from diloco.vault.members import Captured, Member, UnderWay, collect, local_key, restore_member
from diloco.vault.part import PartReader
from diloco.vault.restore import Chosen, fits_run
from diloco.vault.snapshots import VALUES
from service.wire import Wire


class RankState(Wire):
    """What is no tensor, of any rank."""

    loss: float | None = None
    loss_at_sync: float | None = None
    last_sync_at_s: float | None = None
    members: tuple[Member, ...] = ()
    """Of the first rank."""
    under_way: UnderWay | None = None

    @classmethod
    def of(cls, state: dict[str, Any]) -> RankState:
        """Raises `CorruptError`: it is none."""
        try:
            return cls.model_validate(state)
        except ValidationError as exc:
            raise CorruptError(f"state: {exc.errors()[0]['msg']}", field="vault") from exc


class Resumed(NamedTuple):
    """What goes on."""

    state: RankState
    captured: dict[int, Capture]
    """By fragment: contributions that were captured, and perhaps pushed."""

    @property
    def contributions(self) -> set[tuple[object, ...]]:
        return {local_key(fragment, capture.stamp) for fragment, capture in self.captured.items()}


def take_over(chosen: Chosen, island: StreamingIsland, exchange: StreamingExchange) -> Resumed:
    """Let the island be what it was. The module then holds the global parameters: its own come after this.

    Raises:
        VaultError: it is not one of this island.
    """
    state = RankState.of(chosen.generation.state)
    if not state.members:
        raise CorruptError("has no fragments", field="vault")
    exchange.continue_as(len(state.members))

    def read(name: str) -> Tensor:
        return PartReader(chosen.vault.view(chosen.generation.part(name))).tensor(VALUES)

    captured: dict[int, Capture] = {}
    for index, (fragment, member) in enumerate(zip(island.fragments, state.members, strict=True)):
        pending = restore_member(index, fragment, exchange, member, read)
        again = pending or fragment.captured_again()
        if again is not None:
            captured[index] = again
    return Resumed(state, captured)


def compare(
    resumed: Resumed,
    island: StreamingIsland,
    exchange: StreamingExchange,
    client: SynchronizerClient,
    *,
    slot: int,
    is_sure: bool,
    deadline_s: float,
) -> list[int]:
    """See where the run is; fragments that cannot go on as they were start from its global parameters: which ones.

    Raises:
        UnavailableError: the synchronizer does not answer.
        ManifestError: the run trains another model, or cuts it in another way.
    """
    run: OuterState = client.state(deadline_s=deadline_s, slot=slot)
    if not run.initialized:
        return []
    check_model(run, island.manifest)
    check_cut(run, island.manifests)
    refused = []
    for index, (member, fragment) in enumerate(zip(resumed.state.members, island.fragments, strict=True)):
        its = run.fragments[index]
        if not fits_run(member, fragment.global_flat, its, slot=slot, is_sure=is_sure):
            exchange.start_from(index, its.version, deadline_s=deadline_s)
            refused.append(index)
    return refused


class LeaderContents(NamedTuple):
    """The first rank's part of a snapshot beside the hot state."""

    state: RankState
    versions: tuple[Count, ...]
    vectors: tuple[Any, ...]


def leader_contents(
    island: StreamingIsland,
    exchange: StreamingExchange,
    *,
    captured: Captured | None,
    under_way: UnderWay | None,
    loss: float | None,
    loss_at_sync: float | None,
    last_sync_at_s: float | None,
) -> LeaderContents:
    """At a step boundary; copies nothing."""
    members, vectors = collect(island, exchange, captured)
    state = RankState(
        loss=loss,
        loss_at_sync=loss_at_sync,
        last_sync_at_s=last_sync_at_s,
        members=tuple(members),
        under_way=under_way,
    )
    return LeaderContents(state, tuple(member.version for member in members), tuple(vectors))
