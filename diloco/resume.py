"""What an island that is continued needs to know of itself: counters, the global parameters that it started from, and
what is under way. Tensors and plain values only, so that ``torch.load(..., weights_only=True)`` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.digest import sha256
from diloco.feedback import Encoded
from diloco.fragment import wire_bytes
from diloco.island import Contribution, Island
from diloco.schema import Applied, FragmentState
from service.errors import InputError

STATE_FORMAT = 2
"""Of what `diloco.Island` saves. Format 1 had one fragment, under ``member``."""


def island_state(island: Island) -> dict[str, Any]:
    """A copy; the module itself is not in it."""
    return {
        "version": island.version,
        "run": island.run,
        "global": island.global_flat.clone(),
        "steps_since_sync": island.steps_since_sync,
        "tokens_since_sync": island.tokens_since_sync,
        "residual": None if island.feedback is None else island.feedback.residual.clone(),
        "accepted": None if island.accepted is None else _contribution_state(island.accepted),
    }


def restore_island(island: Island, state: dict[str, Any]) -> None:
    """Go on from there; whoever calls has seen that the sizes are those of the module."""
    island.version, island.run = state["version"], state.get("run")
    island.global_flat.copy_(state["global"])
    island.steps_since_sync = state["steps_since_sync"]
    island.tokens_since_sync = state["tokens_since_sync"]
    island.accepted = None if state["accepted"] is None else _contribution(state["accepted"])
    if island.feedback is not None and state["residual"] is not None:
        island.feedback.residual = state["residual"].clone()
        island.feedback.norm = float(torch.linalg.vector_norm(island.feedback.residual))


def continues(state: dict[str, Any], run: FragmentState | None, *, slot: int) -> bool:
    """Whether the run is still where the state can go on from without counting progress twice.

    That is: at the same global parameters, with no other contribution of the slot in the open round, or at those after
    the round that took the state's own contribution, with no later one of the slot in them. Otherwise nobody knows
    whether progress of the state is in it already. A run that is behind takes all progress there is.
    """
    if run is None or run.version < state["version"]:
        return True
    if run.run is not None and state.get("run") not in {None, run.run}:
        return False
    accepted = state["accepted"]
    if run.version == state["version"]:
        is_same = run.digest == sha256(wire_bytes(state["global"].contiguous())).hex()
        return is_same and not _holds_another(run, accepted, slot=slot)
    is_next = accepted is not None and run.version == accepted["in_round"] + 1 == state["version"] + 1
    return is_next and not _has_later(run.applied, state)


def _has_later(applied: Applied | None, state: dict[str, Any]) -> bool:
    """Whether the parameters have a contribution of the slot in them that the state does not know of."""
    known = state["accepted"].get("digest")
    return applied is not None and known is not None and applied.into >= state["version"] and applied.digest != known


def _holds_another(run: FragmentState, accepted: dict[str, Any] | None, *, slot: int) -> bool:
    """Whether the open round has a contribution of the slot with more tokens than the state knows of."""
    known = 0 if accepted is None else max(1, accepted["tokens"])
    return any(entry.slot == slot and entry.tokens > known for entry in run.open_round.contributions)


def fragment_states(state: dict[str, Any], *, slot: int, num_values: Sequence[int]) -> list[dict[str, Any]]:
    """What `island_state` returned of each fragment, in a state that is one of this slot and of this module.

    ``num_values`` are the elements of the fragments here.

    Raises:
        InputError: it is another slot's or module's, of other fragments, or no state.
    """
    if state.get("format") not in (1, STATE_FORMAT):
        raise InputError("is not what state_dict returns", field="state", remedy="give that of an Island")
    if state["slot"] != slot:
        raise InputError(
            f"is that of slot {state['slot']}, this is slot {slot}",
            field="state",
            remedy="give each slot its own state, or make the Island with the slot of the state",
        )
    # Format 1 knew one fragment, which is the whole model.
    states: list[dict[str, Any]] = [state["member"]] if state["format"] == 1 else state["fragments"]
    theirs = [each["global"].numel() for each in states]
    if sum(theirs) != sum(num_values):
        raise InputError(
            f"has {sum(theirs)} parameters, the module has {sum(num_values)}",
            field="state",
            remedy="build the module as it was",
        )
    if theirs != list(num_values):
        raise InputError(
            f"has {len(theirs)} fragments of {theirs} parameters, the run has {list(num_values)}",
            field="state",
            remedy="give it to an island of the run that it is of",
        )
    return states


def random_state() -> dict[str, Any]:
    """Where torch's generators are."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _contribution_state(contribution: Contribution) -> dict[str, Any]:
    encoded = contribution.encoded
    return {
        "round": contribution.round,
        "in_round": contribution.in_round,
        "digest": contribution.digest,
        "local": contribution.local.clone(),
        "inner_steps": contribution.inner_steps,
        "tokens": contribution.tokens,
        "update_norm": contribution.update_norm,
        "left_out": None if encoded is None else encoded.left_out.clone(),
    }


def _contribution(state: dict[str, Any]) -> Contribution:
    # The synchronizer has the payload; what it left out is all that is still needed of it.
    payload: Tensor = torch.empty(0, dtype=torch.uint8)
    left_out = state["left_out"]
    return Contribution(
        round=state["round"],
        into=state["in_round"],
        digest=state.get("digest"),
        local=state["local"].clone(),
        payload=payload,
        encoded=None if left_out is None else _encoded(payload, left_out.clone()),
        inner_steps=state["inner_steps"],
        tokens=state["tokens"],
        update_norm=state["update_norm"],
    )


def _encoded(payload: Tensor, left_out: Tensor) -> Encoded:
    return Encoded(payload=payload, left_out=left_out, norm=float(torch.linalg.vector_norm(left_out)))
