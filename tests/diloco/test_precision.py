from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco.inner import InnerConfig, InnerLoop
from diloco.model import ModelSize, build_model, next_byte_loss
from diloco.precision import Precision

SIZE = ModelSize(num_layers=2, num_heads=2, width=32, context=16)


def train(precision: Precision, *, device: str = "cpu", steps: int = 30) -> tuple[nn.Module, list[float]]:
    module = build_model(SIZE, seed=0).to(device)
    inner = InnerLoop(module, InnerConfig(warmup_steps=0, lr=3e-3, precision=precision))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(97, 105, (4, SIZE.context + 1), generator=generator).to(device)
    losses = []
    for _ in range(steps):
        assert inner.take_step(text)
        assert inner.loss is not None
        losses.append(inner.loss)
    return module, losses


def test_bf16_trains_fp32_parameters_about_as_well() -> None:
    (fp32, exact), (bf16, rounded) = train("fp32"), train("bf16")
    assert exact[-1] < exact[0] - 1
    assert rounded == pytest.approx(exact, rel=0.02)
    assert {p.dtype for p in bf16.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in bf16.parameters() if p.grad is not None} == {torch.float32}
    pairs = zip(fp32.parameters(), bf16.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs), "it was not used at all"


def test_matrices_are_multiplied_in_bf16_and_the_loss_is_fp32() -> None:
    seen: list[torch.dtype] = []
    module = build_model(SIZE, seed=0)

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(model, tokens)
        seen.extend([model(tokens[:, :-1]).dtype, loss.dtype])
        return loss

    InnerLoop(module, InnerConfig(precision="bf16"), loss=loss_of).take_step(torch.zeros(1, 9, dtype=torch.int64))
    assert seen == [torch.bfloat16, torch.float32]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bf16_on_a_gpu_trains_about_as_well() -> None:
    (_, exact), (module, rounded) = train("fp32", device="cuda"), train("bf16", device="cuda")
    assert rounded == pytest.approx(exact, rel=0.02)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
