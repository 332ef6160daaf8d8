"""``wadiloco island --dry-run``: what the island would take, from the model itself, without a word on the network."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.agent.config import IslandSettings
from diloco.agent.worker_config import from_settings
from diloco.bandwidth import bytes_per_s
from diloco.codec import codec_named
from diloco.footprint import Footprint, Memory, StepTime, averaging_memory, fragment_syncs, sync_memory, vault_memory
from diloco.fragment import manifest_of, num_elements, trainable
from diloco.inner import InnerLoop
from diloco.partition import cut
from diloco.protocol import WorkerConfig
from diloco.scheduling import pin_to
from diloco.sharded_optimizer import owned_parameters
from diloco.worker_build import batches_from, build_model, inner_config, open_workload, rank_device
from diloco.workload import Workload
from diloco.workload_loading import blamed, build_optimizer, count_tokens, fault
from service.errors import WadilocoError

FROM_KILOBYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of getrusage's ru_maxrss."""


def print_dry_run(settings: IslandSettings) -> int:
    """Print the footprint of the island that the settings describe; returns the exit code.

    Raises:
        WadilocoError: what would also end its worker at the start.
    """
    footprint = measure(settings)
    sys.stdout.write(footprint.model_dump_json(indent=2) + "\n" if settings.as_json else describe(footprint))
    return 0


def measure(settings: IslandSettings) -> Footprint:
    """Build everything but the connections, and count it.

    Raises:
        WadilocoError: the model, its optimizer or its data cannot be made; a step fails.
    """
    config = worker_config(settings)
    pin_to(config.cores)
    torch.set_num_threads(config.threads)
    workload = open_workload(config)
    module = build_model(workload, config).to(rank_device(config))
    optimizer = build_optimizer(workload, module, inner_config(config))
    # One after the other, so that only one rank's data is held at a time.
    others = (config.model_copy(update={"rank": rank}) for rank in range(1, config.num_ranks))
    tokens = sum(_count_step(workload, batches_from(other, workload, step=0), config) for other in others)
    batches = batches_from(config, workload, step=0)
    tokens += _count_step(workload, batches, config)
    codec, pull = codec_named(settings.codec), codec_named(settings.pull_codec)
    counts = [num_elements(part.tensors) for part in cut(manifest_of(module), settings.num_fragments or 1)]
    trained = sum(counts)
    fragments = fragment_syncs(counts, push=codec, pull=pull, bytes_per_s=bytes_per_s(settings.bandwidth))
    memory = _memory(
        module, optimizer, *sync_memory(counts, codec), num_ranks=config.num_ranks, is_sharded=config.shard_optimizer
    )
    if settings.vault:
        hot = memory.parameters + memory.buffers + memory.optimizer
        memory = memory.model_copy(update={"vault": vault_memory(hot, trained, codec)})
    return Footprint(
        model=model_name(settings),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        num_trained=trained,
        num_ranks=config.num_ranks,
        tokens_per_step=tokens,
        memory=memory,
        memory_total=memory.total,
        codec=codec.name,
        pull_codec=pull.name,
        bandwidth=settings.bandwidth,
        fragments=fragments,
        push_bytes=sum(fragment.push_bytes for fragment in fragments),
        pull_bytes=sum(fragment.pull_bytes for fragment in fragments),
        sync_s=sum(fragment.push_s + fragment.pull_s for fragment in fragments),
        step=_time_steps(workload, module, optimizer, batches, config, settings.dry_run_steps),
    )


def worker_config(settings: IslandSettings) -> WorkerConfig:
    """What the agent would start its first worker with, for the first slot if none is given."""
    chosen = from_settings(settings, rank=0) | {
        "slot": settings.slot or 0,
        "synchronizer_url": settings.synchronizer or "",
        "timeout_s": 1.0,
    }
    return WorkerConfig.model_validate(chosen)


def _count_step(workload: Workload[Any], batches: Iterator[Any], config: WorkerConfig) -> int:
    """Tokens of the next inner step."""
    return sum(count_tokens(workload, next(batches)) for _ in range(config.accumulation_steps))


def model_name(settings: IslandSettings) -> str:
    if settings.workload is not None:
        return settings.workload
    return "byte GPT" if settings.hf_model is None else str(settings.hf_model)


def _memory(
    module: nn.Module,
    optimizer: Optimizer,
    sync_held: int,
    sync_peak: int,
    *,
    num_ranks: int = 1,
    is_sharded: bool = False,
) -> Memory:
    _fill_state(module, optimizer)
    trained = sum(parameter.numel() for parameter in trainable(module).values())
    states = list(optimizer.state.values())
    if is_sharded:
        states = [optimizer.state.get(each, {}) for each in owned_parameters(optimizer, num_ranks)[0]]
    return Memory(
        parameters=_num_bytes(module.parameters()),
        buffers=_num_bytes(module.buffers()),
        gradients=_num_bytes(trainable(module).values()),
        optimizer=_num_bytes(_tensors(states)),
        averaging=averaging_memory(trained, num_ranks=num_ranks, is_sharded=is_sharded),
        sync_held=sync_held,
        sync_peak=sync_peak,
    )


def _fill_state(module: nn.Module, optimizer: Optimizer) -> None:
    """Have the optimizer make its state, whatever its kind, with a step that moves nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in trainable(module).values():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    with blamed("a step of the optimizer"):
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def _tensors(state: Any) -> Iterator[Tensor]:
    """All tensors in a nest of dicts and lists."""
    if isinstance(state, Tensor):
        yield state
        return
    if isinstance(state, dict):
        state = state.values()
    if isinstance(state, Iterable) and not isinstance(state, str):
        for part in state:
            yield from _tensors(part)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _time_steps(
    workload: Workload[Any],
    module: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Any],
    config: WorkerConfig,
    steps: int,
) -> StepTime | None:
    """Wall times of inner steps after one that warms up; None for none."""
    if not steps:
        return None
    inner = InnerLoop(module, inner_config(config), loss=workload.loss, optimizer=optimizer)
    times, counts = [], []
    try:
        for _ in range(1 + steps):
            started_s = time.perf_counter()
            taken = [next(batches) for _ in range(config.accumulation_steps)]
            tokens = [count_tokens(workload, batch) for batch in taken]
            inner.take_step(*taken, tokens=tokens)
            times.append(time.perf_counter() - started_s)
            counts.append(sum(tokens))
    except WadilocoError:
        raise
    except Exception as exc:
        raise fault(exc, "an inner step") from exc
    del times[0], counts[0]
    return StepTime(
        steps=steps,
        median_s=statistics.median(times),
        shortest_s=min(times),
        tokens_per_s=sum(counts) / sum(times),
        peak_rss_bytes=FROM_KILOBYTES * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def describe(footprint: Footprint) -> str:
    """The footprint for people, one line each."""
    memory = footprint.memory
    of = "outer sync" if len(footprint.fragments) == 1 else "outer sync of every fragment"
    rows = [
        ("model", footprint.model),
        ("parameters", f"{footprint.num_parameters:,}, of which {footprint.num_trained:,} are trained and travel"),
        ("tokens per step", f"{footprint.tokens_per_step:,}"),
        *((name, size(getattr(memory, field))) for name, field in MEMORY_ROWS),
        *([("  averaging", size(memory.averaging))] if memory.averaging else []),
        *([("  vault", f"{size(memory.vault)}, shared")] if memory.vault else []),
        ("memory in all", f"{size(footprint.memory_total)} at most, activations and libraries aside"),
        *_rank_rows(footprint),
        ("push", f"{size(footprint.push_bytes)} per {of} ({footprint.codec})"),
        ("pull", f"{size(footprint.pull_bytes)} per {of} ({footprint.pull_codec})"),
        ("time of both", f"{footprint.sync_s:.3f} s at {footprint.bandwidth}, without latency or waiting for others"),
    ]
    if len(footprint.fragments) > 1:
        rows += [
            (
                f"fragment {each.fragment}",
                f"{each.num_values:,} values, push {size(each.push_bytes)} in {each.push_s:.3f} s,"
                f" pull {size(each.pull_bytes)} in {each.pull_s:.3f} s",
            )
            for each in footprint.fragments
        ]
    if footprint.step is not None:
        step = footprint.step
        rows += [
            ("inner step", f"{step.median_s:.4f} s (median of {step.steps}), {step.tokens_per_s:,.0f} tokens/s"),
            ("memory so far", f"{size(step.peak_rss_bytes)} resident at most, with libraries, data and activations"),
        ]
    return "".join(f"{name:<16} {text}\n" for name, text in rows)


def _rank_rows(footprint: Footprint) -> list[tuple[str, str]]:
    if footprint.num_ranks == 1:
        return []
    each = "memory and inner steps are those of the first, the others have no buffers of a sync"
    return [("ranks", f"{footprint.num_ranks}: {each}")]


MEMORY_ROWS = (
    ("  weights", "parameters"),
    ("  buffers", "buffers"),
    ("  gradients", "gradients"),
    ("  optimizer", "optimizer"),
    ("  sync, always", "sync_held"),
    ("  sync, used", "sync_peak"),
)


def size(num_bytes: float) -> str:
    """In units of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
