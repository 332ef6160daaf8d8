"""What the ranks of an island do together. Rank 0 leads: it alone hears orders and speaks to the synchronizer.

Before everything that the ranks do together rank 0 says what comes (`Team.tell`), and the others do that
(`diloco.follower`): so all are at the same step boundary, and none is in a collective while rank 0 waits for a network
or is paused, for it then tells them to hold, every fraction of a second. A rank alone (`Team` itself) does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.ballot import Ballot
from diloco.digest import sha256
from diloco.fragment import flatten_module, trainable, unflatten_into, wire_bytes
from diloco.gradient_average import GradientAverage
from diloco.group import Group
from diloco.sharded_optimizer import shard_optimizer
from service.errors import WadilocoError


class Action(IntEnum):
    """What rank 0 says that comes next."""

    STOP = 0
    HOLD = 1
    """Nothing, for now."""
    PAUSE = 2
    """Nothing, for the island is paused."""
    STEP = 3
    SYNC = 4
    """A sync begins: see that all ranks have the same parameters."""
    SHARE = 5
    """Take over rank 0's parameters."""
    SNAPSHOT = 6
    """Begin a snapshot."""
    KEEP = 7
    """Take a snapshot, and wait until all ranks have it."""


class RanksDifferError(WadilocoError):
    """The ranks of the island hold different parameters: they must start again from the global ones."""


class Team:
    """A rank alone."""

    rank = 0
    num_ranks = 1

    def __init__(self) -> None:
        self.num_tokens = 0
        """Of all ranks together in the last step."""

    def meet(self) -> None:
        """Wait for the other ranks."""

    def prepare(
        self, module: nn.Module, optimizer: Optimizer, *, has_order: Callable[[], bool] = lambda: False
    ) -> None:
        """What will be trained; ``has_order`` says whether a step that waits for the gate on some rank is given up."""

    def tell(self, action: Action) -> None:
        """Rank 0: let the others do this."""

    def start_step(self) -> None:
        """Rank 0: a step begins on all ranks."""

    def weigh(self, num_tokens: int) -> None:
        """The batch of this rank has so many tokens."""
        self.num_tokens = num_tokens

    def average(self, loss: Tensor) -> Tensor:
        """Make this rank's gradients the mean ones of all ranks; returns the mean loss."""
        return loss

    def wait_on(self) -> None:
        """This rank waits for the gate."""

    def abandon(self) -> None:
        """Rank 0: give the step up on all ranks."""

    def share(self, module: nn.Module) -> None:
        """Rank 0: give its parameters to all ranks."""

    def start_sync(self, module: nn.Module) -> None:
        """Rank 0: a sync begins."""

    def newest_of_all(self, number: int) -> int:
        """The lowest of the numbers that the ranks bring."""
        return number

    def close(self) -> None:
        """Leave the others."""


class RankTeam(Team):
    """One of several ranks."""

    def __init__(
        self,
        open_group: Callable[[], Group],
        *,
        rank: int,
        num_ranks: int,
        is_gated: bool,
        shards_optimizer: bool = False,
    ) -> None:
        """``is_gated``: safepoints may hold up a step. The same on all ranks."""
        super().__init__()
        self.rank = rank
        self.num_ranks = num_ranks
        self._open_group = open_group
        self._group: Group | None = None
        self._ballot = Ballot(lambda vote: self.group.start_minimum(vote)) if is_gated else None
        self._shards_optimizer = shards_optimizer
        self._has_order: Callable[[], bool] = lambda: False
        self._average: GradientAverage | None = None

    @property
    def group(self) -> Group:
        assert self._group is not None, "the ranks have not met"
        return self._group

    def meet(self) -> None:
        """Raises `PeerLostError`: not all came in time. So do all methods that need the others."""
        if self._group is None:
            self._group = self._open_group()

    def prepare(
        self, module: nn.Module, optimizer: Optimizer, *, has_order: Callable[[], bool] = lambda: False
    ) -> None:
        self._has_order = has_order
        self._average = GradientAverage(list(trainable(module).values()))
        if self._shards_optimizer:
            shard_optimizer(optimizer, lambda: self.group, rank=self.rank, num_ranks=self.num_ranks)

    def tell(self, action: Action) -> None:
        assert self.rank == 0, "rank 0 leads"
        self.group.broadcast(torch.tensor([int(action)]))

    def hear(self) -> Action:
        """What rank 0 says that comes next."""
        return Action(int(self.group.broadcast(torch.zeros(1, dtype=torch.int64))))

    def start_step(self) -> None:
        self.tell(Action.STEP)
        self.begin_step()

    def begin_step(self) -> None:
        """A step begins on this rank."""
        if self._ballot is not None:
            self._ballot.open()

    def average(self, loss: Tensor) -> Tensor:
        """As `Team.average`.

        Raises:
            YieldInterrupted: the step is given up.
        """
        assert self._average is not None, "nothing has been prepared"
        if self._ballot is not None:
            self._ballot.be_ready(self._has_order)
        mean, self.num_tokens = self._average(self.group, loss, self.num_tokens)
        return mean

    def wait_on(self) -> None:
        if self._ballot is not None:
            self._ballot.wait_on()

    def abandon(self) -> None:
        if self._ballot is not None:
            self._ballot.abandon()

    def share(self, module: nn.Module) -> None:
        self.tell(Action.SHARE)
        self.take_over(module)

    def take_over(self, module: nn.Module) -> None:
        """Go on from the parameters of rank 0.

        Raises:
            RanksDifferError: they did not arrive as they are there.
        """
        flat = self._flattened(module)
        self.group.broadcast(flat)
        if self.rank != 0:
            unflatten_into(flat, module)
        self.verify(module)

    def start_sync(self, module: nn.Module) -> None:
        self.tell(Action.SYNC)
        self.verify(module)

    def verify(self, module: nn.Module) -> None:
        """See that all ranks hold the same parameters, bit for bit.

        Raises:
            RanksDifferError: they do not.
        """
        if not self.group.agrees(fingerprint(self._flattened(module))):
            raise RanksDifferError(
                "the ranks' parameters differ",
                field="ranks",
                remedy="the island starts again from the global parameters; if that repeats, look for ranks that"
                " compute differently: other hardware, or a model that changes parameters outside of the optimizer",
            )

    def newest_of_all(self, number: int) -> int:
        least = torch.tensor([number])
        self.group.start_minimum(least).wait()
        return int(least)

    def _flattened(self, module: nn.Module) -> Tensor:
        assert self._average is not None, "nothing has been prepared"
        return flatten_module(module, out=self._average.scratch)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def fingerprint(flat: Tensor) -> int:
    """62 bits of the digest of a vector on the CPU."""
    return int.from_bytes(sha256(wire_bytes(flat))[:8], "little") >> 2
