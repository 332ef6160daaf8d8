"""A small GPT on bytes, the model that an island trains when it brings none of its own.

Pre-norm transformer (Radford et al., 2019): x ← x + attention(norm(x)), x ← x + mlp(norm(x)), output tied to the
embedding. Residual projections start at 0.02/√(2·layers), all other matrices at 0.02, biases at 0, norms at 1.
Every island of a run draws the same weights from the same seed, so it matters not which of them offers them first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB_SIZE = 256
INIT_STD = 0.02
MLP_RATIO = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the model. The defaults make 3.3 million parameters: about 6 inner steps/s of 512 tokens on one core."""

    num_layers: int = 4
    num_heads: int = 4
    width: int = 256
    context: int = 128

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "width", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be a multiple of num_heads {self.num_heads}")


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width/heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return merged


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, MLP_RATIO * size.width)
        self.down = nn.Linear(MLP_RATIO * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class ByteGPT(nn.Module):
    """Next-byte logits, (batch, length, 256), for byte tokens (batch, length ≤ context)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB_SIZE, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        # The output layer is the embedding itself, not a second name for it: each parameter has one name on the wire.
        logits: Tensor = functional.linear(self.norm(x), self.token_embedding.weight)
        return logits


def build_model(size: ModelSize, *, seed: int) -> ByteGPT:
    """The model with the weights that ``seed`` stands for, on every host the same."""
    model = ByteGPT(size)
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * size.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if "norm.weight" in name else 0.0)
                continue
            is_residual = name.endswith(("attention.out.weight", "down.weight"))
            parameter.normal_(0.0, residual_std if is_residual else INIT_STD, generator=generator)
    return model


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy (nats per token) of predicting tokens[:, 1:]; tokens (batch, length + 1)."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
