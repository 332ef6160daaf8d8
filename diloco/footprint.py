"""What an island takes before it is started: memory, bytes of an outer sync, time of these on a given link. Arithmetic.

With P trained values, c(P) bytes of the codec, and 4 bytes per fp32 value:

    from the start              global parameters, scratch, incoming ones       12P     (+ 4P owed, with a lossy codec)
    from the first sync on      local parameters as they were sent              4P      (+ 4P left out, + c(P))

A contribution of which nobody knows yet what became of it keeps its own of the second line. An fp32 one shares the
memory of its local parameters. Fragments have theirs each. An island of several ranks has these in its first one alone.
Every rank has

    mean gradients on their way             4P              (+ 4P of parameters, with a sharded optimizer)
    its vault, in shared memory             twice parameters, buffers and optimizer, + 16P (24P with a lossy codec)

Activations are not in it: measure steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco.codec import FP32_BYTES, Codec
from diloco.schema import CodecName
from service.wire import Wire


class Memory(Wire):
    """Bytes on the island, activations and libraries aside; with several ranks, on the first, which has the most."""

    parameters: int
    """Frozen ones too."""
    buffers: int
    gradients: int
    optimizer: int
    averaging: int = 0
    """Buffers for what several ranks tell each other."""
    vault: int = 0
    """Snapshots in shared memory, from the first step on."""
    sync_held: int
    """The sync's buffers, from the start."""
    sync_peak: int
    """More of them, from the first sync on."""

    @property
    def total(self) -> int:
        """At most; gradients may be there during a sync."""
        trained = self.parameters + self.buffers + self.gradients + self.optimizer
        return trained + self.averaging + self.vault + self.sync_held + self.sync_peak


class FragmentSync(Wire):
    """One fragment's way through an outer sync."""

    fragment: int
    num_values: int
    push_bytes: int
    """Contribution, encoded."""
    pull_bytes: int
    """New global parameters."""
    push_s: float
    """On a link of its own, without latency."""
    pull_s: float


class StepTime(Wire):
    """Inner steps as they were measured; of several ranks, one's part, without adding up the gradients."""

    steps: int
    median_s: float
    shortest_s: float
    tokens_per_s: float
    peak_rss_bytes: int
    """Of the whole process, with libraries and data."""


class Footprint(Wire):
    """What ``wadiloco island --dry-run`` tells."""

    model: str
    num_parameters: int
    num_trained: int
    num_ranks: int = 1
    tokens_per_step: int
    """Of all ranks together."""
    memory: Memory
    memory_total: int
    codec: CodecName
    pull_codec: CodecName
    bandwidth: str
    fragments: tuple[FragmentSync, ...]
    """All of them sync in one outer step."""
    push_bytes: int
    pull_bytes: int
    sync_s: float
    """Push and pull one after the other, on a link of its own: no latency, no waiting for other islands."""
    step: StepTime | None = None


def sync_memory(num_values: Sequence[int], codec: Codec) -> tuple[int, int]:
    """Bytes that the sync's buffers take from the start, and how many more from the first sync of all fragments on."""
    whole = FP32_BYTES * sum(num_values)
    if codec.carries_parameters:
        return 3 * whole, whole
    return 4 * whole, 2 * whole + sum(codec.num_bytes(count) for count in num_values)


def vault_memory(num_hot_bytes: int, num_values: int, codec: Codec) -> int:
    """Bytes of two generations: of what changes at each step, and of what a sync changes (`diloco.vault.members`)."""
    return 2 * num_hot_bytes + FP32_BYTES * num_values * (4 if codec.carries_parameters else 6)


def averaging_memory(num_values: int, *, num_ranks: int, is_sharded: bool) -> int:
    """Bytes of the buffers of one of several ranks."""
    if num_ranks == 1:
        return 0
    return FP32_BYTES * num_values * (2 if is_sharded else 1)


def fragment_syncs(
    num_values: Sequence[int], *, push: Codec, pull: Codec, bytes_per_s: float
) -> tuple[FragmentSync, ...]:
    """The outer sync of a model whose fragments have so many values each."""
    return tuple(
        FragmentSync(
            fragment=fragment,
            num_values=count,
            push_bytes=push.num_bytes(count),
            pull_bytes=pull.num_bytes(count),
            push_s=push.num_bytes(count) / bytes_per_s,
            pull_s=pull.num_bytes(count) / bytes_per_s,
        )
        for fragment, count in enumerate(num_values)
    )
