"""Between vectors on the CPU and parameters on a GPU: through two pinned buffers in turn.

Pseudo-gradients and global parameters stay on the CPU. A copy between pageable memory and a GPU goes through a small
buffer of the driver, and the host waits for all of it; here one buffer is filled or emptied by the host while the other
is on its way, on a stream of its own, and an event says when a buffer is free again.

The host returns when all has arrived, and begins when the device is idle: the calling thread may be another than the
one that computes, and knows none of its streams. On a CPU the same code copies plainly, through plain buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BUFFER_VALUES = 1 << 23
"""Of each of the two buffers, 32 MiB: long enough to fill the bus, and little of a host's memory to pin."""

Pair = tuple[Tensor, Tensor]
"""A part of a vector on the CPU, and the parameter (contiguous fp32) of as many elements on the device."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one tensor, and where it lies in a buffer."""

    index: int
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def fills(sizes: Sequence[int], capacity: int) -> Iterator[list[Piece]]:
    """Tensors of these sizes one after another, as the contents of a buffer that is filled again and again (pure)."""
    fill: list[Piece] = []
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + capacity - used)
            fill.append(Piece(index, start, stop, used))
            used += stop - start
            start = stop
            if used == capacity:
                yield fill
                fill, used = [], 0
    if fill:
        yield fill


def new_event() -> torch.cuda.Event:
    """One that lets the host sleep while it waits: its core is the server's."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class Lane:
    """Two buffers, a stream to copy on, and for each buffer the event after its last copy."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        is_cuda = device.type == "cuda"
        self.buffers = [torch.empty(capacity, dtype=torch.float32, pin_memory=is_cuda) for _ in range(2)]
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._events = [new_event() for _ in range(2)] if is_cuda else []

    def open(self) -> AbstractContextManager[Any]:
        """Copies of the block go to the lane, after all that the device was given before."""
        if self._stream is None:
            return nullcontext()
        torch.cuda.synchronize(self._device)
        return torch.cuda.stream(self._stream)

    def mark(self, slot: int) -> None:
        """The copies of this buffer have been given to the device."""
        if self._stream is not None:
            self._events[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """Until they are done; at once if there were none."""
        if self._events:
            self._events[slot].synchronize()


def is_staged(vector: Tensor, parameter: Tensor) -> bool:
    """Whether what passes between the two goes through here."""
    return (
        parameter.device.type == "cuda"
        and vector.device.type == "cpu"
        and parameter.dtype is torch.float32
        and parameter.is_contiguous()
    )


def download(pairs: Sequence[Pair], *, capacity: int = BUFFER_VALUES) -> None:
    """Copy each parameter into its part of the vector."""
    if not pairs:
        return
    vectors, parameters = _flat(pairs)
    lane = Lane(parameters[0].device, capacity)
    on_way: list[list[Piece]] = []

    def take_in(number: int) -> None:
        lane.wait(number % 2)
        for piece in on_way[number]:
            vectors[piece.index][piece.start : piece.stop].copy_(_of(lane.buffers[number % 2], piece))

    with lane.open():
        for number, fill in enumerate(fills([len(each) for each in parameters], capacity)):
            if number >= 2:
                take_in(number - 2)
            on_way.append(fill)
            for piece in fill:
                part = parameters[piece.index][piece.start : piece.stop]
                _of(lane.buffers[number % 2], piece).copy_(part, non_blocking=True)
            lane.mark(number % 2)
        for number in range(max(len(on_way) - 2, 0), len(on_way)):
            take_in(number)


def upload(pairs: Sequence[Pair], *, capacity: int = BUFFER_VALUES) -> None:
    """Set each parameter from its part of the vector."""
    if not pairs:
        return
    vectors, parameters = _flat(pairs)
    lane = Lane(parameters[0].device, capacity)
    with lane.open():
        for number, fill in enumerate(fills([len(each) for each in parameters], capacity)):
            slot = number % 2
            lane.wait(slot)
            for piece in fill:
                buffer = _of(lane.buffers[slot], piece).copy_(vectors[piece.index][piece.start : piece.stop])
                parameters[piece.index][piece.start : piece.stop].copy_(buffer, non_blocking=True)
            lane.mark(slot)
        lane.wait(0)
        lane.wait(1)


def shift(triples: Sequence[tuple[Tensor, Tensor, Tensor]], *, capacity: int = BUFFER_VALUES) -> None:
    """Set each parameter l to (l - base) + to on the device: the bits that the CPU would get.

    ``triples`` are (part of base, part of to, parameter), the first two on the CPU.
    """
    if not triples:
        return
    bases = [base.reshape(-1) for base, _, _ in triples]
    targets, parameters = _flat([(to, parameter) for _, to, parameter in triples])
    device = parameters[0].device
    lane = Lane(device, capacity)
    with lane.open():
        scratch = [torch.empty(capacity, dtype=torch.float32, device=device) for _ in range(2)]
        for fill in fills([len(each) for each in parameters], capacity):
            used = fill[-1].at + fill[-1].size
            for slot, vectors in enumerate((bases, targets)):
                lane.wait(slot)
                for piece in fill:
                    _of(lane.buffers[slot], piece).copy_(vectors[piece.index][piece.start : piece.stop])
                scratch[slot][:used].copy_(lane.buffers[slot][:used], non_blocking=True)
                lane.mark(slot)
            for piece in fill:
                local = parameters[piece.index][piece.start : piece.stop]
                local.sub_(_of(scratch[0], piece)).add_(_of(scratch[1], piece))
        # Behind the sums, which read the scratch that goes back to the allocator here.
        lane.mark(0)
        lane.wait(0)


def _flat(pairs: Sequence[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    return [vector.reshape(-1) for vector, _ in pairs], [parameter.detach().view(-1) for _, parameter in pairs]


def _of(buffer: Tensor, piece: Piece) -> Tensor:
    return buffer[piece.at : piece.at + piece.size]
