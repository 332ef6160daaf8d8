"""What a rank worker is built of, by its configuration: workload, model, device, and the settings of its loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from diloco.byte_text import ByteText
from diloco.codec import codec_named
from diloco.device import choose_device
from diloco.hf_causal_lm import HfCausalLM
from diloco.inner import InnerConfig
from diloco.model import ModelSize
from diloco.parked import Built
from diloco.protocol import WorkerConfig
from diloco.safepoint import Patience
from diloco.streaming import StreamingIsland
from diloco.workload import Part, Shard, Workload
from diloco.workload_loading import build_checkpointed_module, build_module, load_workload, open_batches


def model_size(config: WorkerConfig) -> ModelSize:
    return ModelSize(
        num_layers=config.num_layers, num_heads=config.num_heads, width=config.width, context=config.context
    )


def patience_of(config: WorkerConfig) -> Patience:
    return Patience(patience_s=config.gate_patience_s, trickle_s=config.gate_trickle_s)


def inner_config(config: WorkerConfig) -> InnerConfig:
    """The settings of the inner loop, by their names."""
    return InnerConfig(**config.model_dump(include={field.name for field in fields(InnerConfig)} - {"betas"}))


def open_workload(config: WorkerConfig) -> Workload[Any]:
    """What the rank trains: the researcher's own, a Hugging Face model, or the byte GPT."""
    if config.workload is not None:
        return load_workload(config.workload, config.workload_options)
    if config.hf_model is not None:
        return HfCausalLM(config.hf_model, data=config.data, context=config.context, batch_size=config.batch_size)
    return ByteText(model_size(config), data=config.data, batch_size=config.batch_size)


def build_model(workload: Workload[Any], config: WorkerConfig) -> nn.Module:
    """The model as it is trained, in the memory of the host.

    Raises:
        InputError: it cannot be built.
    """
    build = build_checkpointed_module if config.activation_checkpointing else build_module
    return build(workload, seed=config.seed)


def rank_device(config: WorkerConfig) -> torch.device:
    return choose_device(config.device, rank=config.rank, num_ranks=config.num_ranks)


def build(config: WorkerConfig) -> Built:
    """What a worker of any slot begins with."""
    workload = open_workload(config)
    module = build_model(workload, config)
    return Built(workload, module, StreamingIsland(module, codec_named(config.codec)))


def batches_from(config: WorkerConfig, workload: Workload[Any], *, step: int) -> Iterator[Any]:
    """The rank's batches from this inner step on. As many per step, skipped ones too: they go on where the slot was."""
    shard = Shard(slot=config.slot, num_shards=config.data_shards, seed=config.seed)
    part = Part(rank=config.rank, num_ranks=config.num_ranks)
    return open_batches(workload, shard, part, position=step * config.accumulation_steps)
