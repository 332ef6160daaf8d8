"""The process group of an island's ranks: made for one epoch, used, and given up.

Outside of `torch.distributed`'s global state, so that a broken group leaves nothing behind: the next one is made beside
it, over another part of the store. Every call ends within the one timeout. A peer that is killed is an error for its
neighbours at once, and for the others at the timeout: gloo cannot be woken from a wait. Whoever sees the death (the
agent) therefore ends the other ranks, too.

Tensors on the CPU (votes, orders) go over gloo. On GPUs there is an NCCL communicator beside it (`diloco.nccl`), for
the tensors that are there. NCCL does not see that a peer died, but gloo does: where both are used, gloo comes first.

Collectives run in the order in which they are called, which must be the same on all ranks. With gloo, a sum has the
same bits on all ranks: each part is added up on one of them and sent round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from diloco.device import CPU
from diloco.nccl import abort, open_nccl
from diloco.scheduling import become_idle
from service.errors import UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
CLOSE_S = 5.0
"""Time that a group has to end its threads; then it is left alone, which costs what it holds."""


class PeerLostError(UnavailableError):
    """Another rank of the island is gone, or did not come to a collective in time: the group is of no use any more."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way; its tensor may be read after `wait`."""

    work: Any
    timeout_s: float

    @property
    def is_done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Raises `PeerLostError`."""
        try:
            self.work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as exc:
            raise lost(exc) from exc


class Group:
    """A process group of one epoch."""

    def __init__(
        self, backend: Any, store: c10d.Store, *, rank: int, num_ranks: int, timeout_s: float, nccl: Any = None
    ) -> None:
        """Use `open_group`."""
        self._backend = backend
        self._nccl = nccl
        self._store = store
        """Held for the backend: what C++ holds of a store that is written in Python does not keep it alive."""
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s

    def start_sum(self, tensor: Tensor) -> Pending:
        """Add up a tensor over all ranks, in place; the tensor must stay untouched until the end."""
        options = _reduction(c10d.ReduceOp.SUM, self.timeout_s)
        return self._start(tensor, lambda backend: backend.allreduce([tensor], options))

    def start_minimum(self, tensor: Tensor) -> Pending:
        """The least of each element over all ranks, in place."""
        options = _reduction(c10d.ReduceOp.MIN, self.timeout_s)
        return self._start(tensor, lambda backend: backend.allreduce([tensor], options))

    def start_broadcast(self, tensor: Tensor, *, source: int = 0) -> Pending:
        """Give the source's tensor to all ranks, in place."""
        options = c10d.BroadcastOptions()
        options.rootRank = source
        options.timeout = timedelta(seconds=self.timeout_s)
        return self._start(tensor, lambda backend: backend.broadcast([tensor], options))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        self.start_broadcast(tensor, source=source).wait()
        return tensor

    def agrees(self, value: int) -> bool:
        """Whether all ranks brought the same number (of 63 bits)."""
        bounds = torch.tensor([value, -value])
        self.start_minimum(bounds).wait()
        return bool(bounds[0] == -bounds[1])

    def close(self, *, within_s: float = CLOSE_S) -> bool:
        """End the group's threads and connections; says whether they ended in time.

        One whose collective hangs ends with the group's timeout, on a thread that nobody waits for. On a GPU it is
        aborted, so that nothing of it spins there.
        """
        # A list, so that the last reference is dropped on that thread: it joins gloo's.
        held, nccl = [self._backend, self._nccl], self._nccl
        self._backend = self._nccl = None

        def drop() -> None:
            if nccl is not None:
                abort(nccl)
            held.clear()

        thread = threading.Thread(target=drop, name="close group", daemon=True)
        thread.start()
        thread.join(within_s)
        if thread.is_alive():
            logger.warning("a group did not end in time, left alone rank=%d within_s=%.1f", self.rank, within_s)
        return not thread.is_alive()

    def _start(self, tensor: Tensor, call: Callable[[Any], Any]) -> Pending:
        if self._backend is None:
            raise PeerLostError("the group has been closed", field="group")
        backend = self._backend if tensor.device.type == "cpu" else self._nccl
        assert backend is not None, "a tensor on a GPU needs a group that was opened for one"
        try:
            return Pending(call(backend), self.timeout_s)
        except RuntimeError as exc:
            raise lost(exc) from exc


def open_group(
    store: c10d.Store,
    *,
    rank: int,
    num_ranks: int,
    timeout_s: float,
    device: torch.device = CPU,
    hostname: str = LOOPBACK,
    idle: bool = False,
) -> Group:
    """Meet the other ranks over the store, whose keys must be this epoch's alone.

    Args:
        device: of this rank's tensors; of a GPU they go over NCCL, and those on the CPU over gloo all the same.
        hostname: this host's address that the other ranks reach; gloo's connections know no password, hence loopback.
        idle: let the group's threads run only when nobody else wants their core.

    Raises:
        PeerLostError: not all ranks came within the timeout.
        ConfigError: this torch lacks NCCL.
    """

    def make() -> tuple[Any, Any]:
        # First gloo: a rank that does not come is told here, and not by NCCL, which would wait for ever.
        gloo = _make_gloo(store, rank, num_ranks, timeout_s, hostname)
        if device.type == "cpu":
            return gloo, None
        return gloo, open_nccl(store, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s, device=device)

    try:
        gloo, nccl = on_own_thread(make, idle=idle, within_s=timeout_s + CLOSE_S)
    except RuntimeError as exc:
        raise lost(exc) from exc
    return Group(gloo, store, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s, nccl=nccl)


def lost(exc: Exception) -> PeerLostError:
    """The one error for whatever torch raises when a peer is gone."""
    message = next(iter(str(exc).splitlines()), type(exc).__name__)
    return PeerLostError(message[:500], field="group", remedy="the ranks start again together, by themselves")


def on_own_thread(make: Callable[[], T], *, within_s: float, idle: bool = False) -> T:
    """Threads inherit their priority from the one that starts them, which cannot come back from idle."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        if idle:
            become_idle()
        try:
            done.append(make())
        except BaseException as exc:  # noqa: BLE001 - raised again on the thread that waits
            failed.append(exc)

    thread = threading.Thread(target=run, name="open group", daemon=True)
    thread.start()
    thread.join(within_s)
    if failed:
        raise failed.pop()
    if not done:
        raise PeerLostError(f"not all ranks came within {within_s:.0f} s", field="group")
    return done.pop()


def _make_gloo(store: c10d.Store, rank: int, num_ranks: int, timeout_s: float, hostname: str) -> Any:
    options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    # One thread: collectives come one after another, and two would share the core that the steps need.
    options._threads = 1
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=hostname)]
    return c10d.ProcessGroupGloo(store, rank, num_ranks, options)


def _reduction(operation: Any, timeout_s: float) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = operation
    options.timeout = timedelta(seconds=timeout_s)
    return options
