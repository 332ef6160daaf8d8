"""The ranks of a training loop of one's own that are one island: rank 0 speaks for them, all go on from the same bits.

Once per step the ranks add up three numbers: their tokens, the step that they are at, and what rank 0 says that comes
(`Order`). Nobody decides alone, so a sync is at the same step on all. When rank 0 syncs, the others wait for what it
made of the module, in two phases: they take the new parameters in beside their own, compare digests, and only then does
anybody go on from them. A rank that is lost before is an error for all others, with the parameters that they had; rank
0 goes back to them. What is left is the instant in which some have counted all digests and others have not.

Every wait ends with the group's timeout; a dead neighbour is seen at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ManifestError
from diloco.fragment import flatten_module, unflatten_into
from diloco.group import PeerLostError
from diloco.loop_group import LoopGroup, open_loop_group
from diloco.schema import Slot, SyncReport
from diloco.team import RanksDifferError, fingerprint
from service.errors import ConfigError, ConflictError, InputError, UnavailableError, WadilocoError
from service.wire import Wire

logger = logging.getLogger(__name__)

Ranks = ProcessGroup | Literal["world"]

TOLD_AS_THEY_ARE = (ConfigError, ConflictError, InputError, ManifestError, PeerLostError, UnavailableError)
"""Errors of rank 0 that are raised on the other ranks, too; all else is an `UnavailableError` there."""


class Order(IntEnum):
    """What rank 0 says that comes at a step boundary."""

    NONE = 0
    HOLD = 1
    """Nothing, for now: the run is paused."""
    SYNC = 2
    FINISH = 3
    """Apply the result of the sync under way."""
    STOP = 4
    """The controller has taken the slot back."""


class Told(Wire):
    """What rank 0 says of the island after it was at work on the module."""

    slot: Slot
    num_fragments: int
    version: int
    steps_since_sync: int
    residual_norm: float | None = None
    report: SyncReport | None = None
    exact: bool = True


class Failure(Wire):
    """How rank 0 failed instead."""

    kind: str
    message: str
    field: str | None = None
    remedy: str | None = None


class Outcome(Wire):
    """What comes before the parameters."""

    told: Told | None = None
    failure: Failure | None = None
    changed: list[tuple[int, int]] = Field(default_factory=list)
    """Parts of the flat parameters that are not as before: from, to."""


def unwrapped(module: nn.Module, *, has_ranks: bool) -> nn.Module:
    """The module that DDP wraps; any other as it is.

    Raises:
        ConfigError: DDP has several ranks, and the island knows of one.
    """
    if not isinstance(module, DistributedDataParallel):
        return module
    if not has_ranks and module.process_group.size() > 1:
        raise ConfigError(
            f"is missing, and the module is trained by {module.process_group.size()} ranks (DistributedDataParallel)",
            field="process_group",
            remedy='give process_group="world", or the group that DDP has: otherwise each rank is an island',
        )
    inner: nn.Module = module.module
    return inner


class RankCircle:
    """The ranks of one island."""

    def __init__(self, ranks: Ranks, module: nn.Module, *, timeout_s: float) -> None:
        """``timeout_s`` is the longest wait for another rank, syncs included.

        Raises:
            ConfigError: there is no such group, or this process is not in it.
            PeerLostError: not all came in time.
        """
        self._group: LoopGroup = open_loop_group(ranks, timeout_s=timeout_s)
        self._module = module
        self._before = flatten_module(module)  # (parameters,) fp32, on the CPU
        self._after = torch.empty_like(self._before)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        return self._group.num_ranks

    def meet(self, step: int, tokens: int, order: Order) -> tuple[int, Order]:
        """At a step boundary: the tokens of all ranks, and rank 0's order. Waits while rank 0 says to hold.

        Raises:
            RanksDifferError: the ranks have taken different numbers of steps.
        """
        while True:
            told = torch.tensor([tokens, step, int(order) if self.rank == 0 else 0], dtype=torch.int64)
            self._group.start_sum(told).wait()
            if int(told[1]) != step * self.num_ranks:
                raise RanksDifferError(
                    f"this rank is at step {step}, and the mean of all is {int(told[1]) / self.num_ranks}",
                    field="process_group",
                    remedy="call step once after each optimizer step, on all ranks",
                )
            total, heard = int(told[0]), Order(int(told[2]))
            if heard is not Order.HOLD or self.rank == 0:
                return total, heard

    def require_all(self, error: Exception | None) -> None:
        """Raise the error of this rank, or say that another rank has one.

        Raises:
            InputError: another rank has.
        """
        is_well = torch.tensor([int(error is None)])
        self._group.start_minimum(is_well).wait()
        if error is not None:
            raise error
        if not int(is_well):
            raise InputError(
                "is refused on another rank, whose error says why", field="state", remedy="give each rank its own state"
            )

    def lead(self, work: Callable[[], Told], *, anew: bool = False) -> Told:
        """On rank 0: do work on the module, and have the other ranks go on from what it is then.

        They are told what the work returns. ``anew`` gives them all of it, whatever they had.

        Raises:
            RanksDifferError: the ranks did not have the same parameters before. Then no work is done.
            PeerLostError: a rank is gone. The module is as it was before.
        """
        self._compare(anew=anew)
        try:
            told = work()
        except BaseException as exc:
            self._tell_failure(exc)
            raise
        flatten_module(self._module, out=self._after)
        changed = [(0, self._after.numel())] if anew else differences(self._before, self._after)
        try:
            self._group.send(Outcome(told=told, changed=changed).model_dump_json().encode())
            self._give(changed)
        except WadilocoError:
            unflatten_into(self._before, self._module)
            raise
        return told

    def follow(self, *, anew: bool = False) -> Told:
        """On the other ranks: wait for what rank 0 makes of the module, and go on from it.

        Raises:
            WadilocoError: that of rank 0.
            RanksDifferError, PeerLostError: as in `lead`.
        """
        self._compare(anew=anew)
        outcome = Outcome.model_validate_json(self._group.receive())
        if outcome.failure is not None:
            raise error_of(outcome.failure)
        assert outcome.told is not None, "rank 0 says how it ended"
        self._after.copy_(self._before)
        self._give(outcome.changed)
        if outcome.changed:
            unflatten_into(self._after, self._module)
        return outcome.told

    def close(self) -> None:
        self._group.close()

    def _compare(self, *, anew: bool) -> None:
        flatten_module(self._module, out=self._before)
        if not anew and not self._group.agrees(fingerprint(self._before)):
            raise RanksDifferError(
                "the ranks' parameters differ",
                field="process_group",
                remedy="wrap the module in DistributedDataParallel, and change parameters in its optimizer alone",
            )

    def _give(self, changed: list[tuple[int, int]]) -> None:
        """From rank 0's new parameters to those of the others, until all have all of them."""
        for start, stop in changed:
            self._group.broadcast(self._after[start:stop])
        if changed and not self._group.agrees(fingerprint(self._after)):
            raise PeerLostError("parameters did not arrive as they were sent", field="process_group")

    def _tell_failure(self, error: BaseException) -> None:
        failure = Failure(
            kind=type(error).__name__,
            message=error.message if isinstance(error, WadilocoError) else f"rank 0 failed: {error!r}",
            field=error.field if isinstance(error, WadilocoError) else None,
            remedy=error.remedy if isinstance(error, WadilocoError) else None,
        )
        try:
            self._group.send(Outcome(failure=failure).model_dump_json().encode())
        except PeerLostError as exc:
            logger.warning("the other ranks could not be told error=%s", exc)


def error_of(failure: Failure) -> WadilocoError:
    """The error of rank 0, for the other ranks."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in TOLD_AS_THEY_ARE}
    made: WadilocoError = kinds.get(failure.kind, UnavailableError)(
        failure.message, field=failure.field, remedy=failure.remedy
    )
    return made


BLOCK = 1 << 16


def differences(before: Tensor, after: Tensor) -> list[tuple[int, int]]:
    """The parts of two fp32 vectors that are not bit for bit the same, in blocks: from, to. Pure."""
    found: list[tuple[int, int]] = []
    for start in range(0, before.numel(), BLOCK):
        stop = min(start + BLOCK, before.numel())
        if torch.equal(before[start:stop].view(torch.int32), after[start:stop].view(torch.int32)):
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
