"""What an island is to the run, as a snapshot holds it: global parameters, what is owed, contributions under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from diloco.island import Capture, Contribution, Island
from diloco.protocol import SyncCommand
from diloco.schema import Count
from diloco.streaming import StreamingExchange, StreamingIsland
from service.wire import Wire

HELD_PER_FRAGMENT = {False: 4, True: 6}
"""Regions that a fragment's vectors take in two successive generations at most, without and with what a codec leaves
out: global parameters and local ones of two contributions, one of which changes; with it also what is owed and left
out, which become one another."""


class Held(Wire):
    """A contribution that the synchronizer has, or may have."""

    round: Count
    into: Count | None = None
    inner_steps: Count
    tokens: Count
    update_norm: float = Field(default=0.0, ge=0)
    digest: str | None = None
    """sha-256 of what travelled, once the synchronizer has said so."""
    local: str
    """Name of the part with its local parameters."""
    left_out: str | None = None


class Member(Wire):
    """One fragment."""

    version: Count
    run: str | None = None
    """Identity of the run that the version counts in."""
    steps_since_sync: int
    tokens_since_sync: int
    accepted: Held | None = None
    pending: Held | None = None
    """Captured, and perhaps pushed: nobody knows."""


class UnderWay(Wire):
    """A sync that has begun."""

    command: SyncCommand
    fragment: int
    started_s: float
    due_step: Count | None = None
    """Inner step after which its result is adopted; None: as soon as it is there."""


class Vector(NamedTuple):
    """Parameters that change at a sync only."""

    name: str
    values: Tensor  # (parameters of the fragment,) fp32
    key: tuple[object, ...]
    """Another one whenever the values are others."""


class Captured(NamedTuple):
    """What a sync under way contributes."""

    fragment: int
    capture: Capture


def collect(
    island: StreamingIsland, exchange: StreamingExchange, captured: Captured | None
) -> tuple[list[Member], list[Vector]]:
    """All fragments as they are at this step boundary; tensors are not copied."""
    members, vectors = [], []
    for index, fragment in enumerate(island.fragments):
        own = captured.capture if captured is not None and captured.fragment == index else None
        member, more = _collect_one(index, fragment, exchange.offered(index), own)
        members.append(member)
        vectors += more
    return members, vectors


def _collect_one(
    index: int, fragment: Island, offered: Contribution | None, captured: Capture | None
) -> tuple[Member, list[Vector]]:
    vectors = [Vector(f"global/{index}", fragment.global_flat, ("global", index, fragment.revision))]
    if fragment.feedback is not None:
        feedback = fragment.feedback
        vectors.append(Vector(f"owed/{index}", feedback.residual, ("left_out", index, _Same(feedback.source))))
    accepted, held = fragment.accepted, None
    if accepted is not None:
        held = _held(accepted, f"local/{index}/0")
        vectors.append(Vector(held.local, accepted.local, local_key(index, accepted.stamp)))
        if accepted.encoded is not None:
            held = held.model_copy(update={"left_out": f"left_out/{index}"})
            vectors.append(
                Vector(f"left_out/{index}", accepted.encoded.left_out, ("left_out", index, _Same(accepted.encoded)))
            )
    pending = None
    unsure = captured or offered
    if unsure is not None and (accepted is None or unsure.stamp != accepted.stamp):
        local = unsure.workspace.local if isinstance(unsure, Capture) else unsure.local
        pending = _held(unsure, f"local/{index}/1")
        vectors.append(Vector(pending.local, local, local_key(index, unsure.stamp)))
    member = Member(
        version=fragment.version,
        run=fragment.run,
        steps_since_sync=fragment.steps_since_sync,
        tokens_since_sync=fragment.tokens_since_sync,
        accepted=held,
        pending=pending,
    )
    return member, vectors


def local_key(fragment: int, stamp: int) -> tuple[object, ...]:
    """Names the local parameters of a contribution."""
    return ("local", fragment, stamp)


class _Same:
    """Equal to what holds the very same object, which lives on with it: its number is not given to another."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held

    def __hash__(self) -> int:
        return id(self._held)


def _held(contribution: Contribution | Capture, local: str) -> Held:
    held = Held(round=contribution.round, inner_steps=contribution.inner_steps, tokens=contribution.tokens, local=local)
    if isinstance(contribution, Capture):
        return held
    return held.model_copy(
        update={
            "into": contribution.into,
            "digest": contribution.digest,
            "update_norm": contribution.update_norm,
        }
    )


def restore_member(
    index: int,
    fragment: Island,
    exchange: StreamingExchange,
    member: Member,
    read: Callable[[str], Tensor],
) -> Capture | None:
    """Let a fragment be what it was; ``read`` gives the values of a part. Returns what a sync under way contributes."""
    fragment.rebase(read(f"global/{index}"), member.version)
    fragment.run = member.run
    fragment.steps_since_sync = member.steps_since_sync
    fragment.tokens_since_sync = member.tokens_since_sync
    if fragment.feedback is not None:
        fragment.feedback.residual.copy_(read(f"owed/{index}"))
        fragment.feedback.norm = float(torch.linalg.vector_norm(fragment.feedback.residual))
        fragment.feedback.source = object()
    if member.accepted is not None:
        _restore_accepted(fragment, member.accepted, read)
    if member.pending is None:
        return None
    pending = member.pending
    captured = fragment.recapture(
        inner_steps=pending.inner_steps, tokens=pending.tokens, fill=lambda local: local.copy_(read(pending.local))
    )
    exchange.offer_again(index, fragment.encode(captured))
    return captured


def _restore_accepted(fragment: Island, held: Held, read: Callable[[str], Tensor]) -> None:
    def fill(local: Tensor, left_out: Tensor) -> None:
        local.copy_(read(held.local))
        if held.left_out is not None:
            left_out.copy_(read(held.left_out))

    nothing = torch.empty(0)
    fragment.reaccept(
        Contribution(
            round=held.round,
            into=held.into,
            digest=held.digest,
            local=nothing,
            payload=nothing,
            inner_steps=held.inner_steps,
            tokens=held.tokens,
            update_norm=held.update_norm,
        ),
        fill=fill,
    )
