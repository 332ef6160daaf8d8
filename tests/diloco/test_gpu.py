"""What trains on a GPU, against what trains on the CPU. Where the two compute alike, the bodies also run here on a CPU.

``deploy/local/test_gpu.sh`` runs all tests that need a GPU, on a host that has one.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import Island as LibraryIsland
from diloco.codec import CODECS
from diloco.device import choose_device, lowest_priority
from diloco.fragment import flatten_module, shift_module, unflatten_into
from diloco.group import open_group
from diloco.inner import InnerConfig, InnerLoop
from diloco.model import ModelSize, build_model
from diloco.protocol import FailedEvent, ReadyEvent
from diloco.resume import random_state, restore_random_state
from diloco.schema import CodecName, Phase, SyncOutcome
from diloco.streaming import StreamingIsland
from service.errors import ConfigError
from tests.diloco.rank_process import TIMEOUT_S, Ranks, all_do
from tests.diloco.test_worker import WorkerUnderTest, start

__all__ = ["start"]

Serve = Callable[..., str]
Start = Callable[..., WorkerUnderTest]

SIZE = ModelSize(num_layers=2, num_heads=2, width=32, context=16)
HAS_GPU = torch.cuda.is_available()
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def module_on(device: str, seed: int = 0) -> nn.Module:
    return build_model(SIZE, seed=seed).to(device)


@devices
def test_parameters_cross_over_bit_for_bit_whatever_their_layout(device: str) -> None:
    module = module_on(device)
    # Not contiguous, so that it cannot be copied in one piece.
    module.extra = nn.Parameter(torch.arange(12.0).view(3, 4).to(device).t())
    flat = flatten_module(module)
    assert flat.device.type == "cpu"
    assert torch.equal(flat, torch.cat([p.detach().cpu().reshape(-1) for _, p in sorted(module.named_parameters())]))
    base, to = torch.randn_like(flat), torch.randn_like(flat)
    shift_module(module, base=base, to=to)
    assert torch.equal(flatten_module(module), (flat - base) + to)
    unflatten_into(base, module)
    assert torch.equal(flatten_module(module), base)


@devices
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_islands_leave_and_join_a_round_with_the_bits_of_one_on_the_cpu(device: str, codec: CodecName) -> None:
    def outcome(module: nn.Module) -> tuple[Tensor, Tensor]:
        island = StreamingIsland(module, CODECS[codec], num_fragments=2)
        start = flatten_module(module)
        for step in range(3):
            unflatten_into(start + torch.randn(start.shape, generator=torch.Generator().manual_seed(step)), module)
            island.count_step(64)
            fragment = island.fragments[step % 2]
            fragment.accepted = fragment.contribution()
            island.count_step(64)
            fragment.adopt(fragment.global_flat * 0.5, fragment.version + 1)
        residual = island.fragments[0].feedback
        return flatten_module(module), torch.zeros(1) if residual is None else residual.residual

    for mine, theirs in zip(outcome(module_on(device)), outcome(module_on("cpu")), strict=True):
        assert torch.equal(mine, theirs)


@devices
def test_steps_on_a_stream_of_the_lowest_priority_train_as_on_the_cpu(device: str) -> None:
    def losses(where: str) -> list[float]:
        module = module_on(where)
        inner = InnerLoop(module, InnerConfig(warmup_steps=0, lr=3e-3))
        text = torch.randint(97, 105, (4, SIZE.context + 1), generator=torch.Generator().manual_seed(0))
        found = []
        for _ in range(30):
            assert inner.take_step(text)  # moved to the module's device
            found.append(inner.loss or 0.0)
        return found

    with lowest_priority(torch.device(device, 0) if device == "cuda" else torch.device(device)):
        mine = losses(device)
    assert mine == pytest.approx(losses("cpu"), rel=1e-3)
    assert mine[-1] < mine[0] - 1


@devices
def test_random_numbers_go_on_where_they_were(device: str) -> None:
    torch.rand(3, device=device)
    file = io.BytesIO()
    torch.save(random_state(), file)
    expected = torch.rand(5, device=device)
    file.seek(0)
    restore_random_state(torch.load(file, weights_only=True))
    assert torch.equal(torch.rand(5, device=device), expected)


@devices
def test_a_loop_is_continued_bit_for_bit(serve: Serve, tmp_path: Path, device: str) -> None:
    def train(url: str, num_steps: int, saved: io.BytesIO | None = None) -> tuple[Tensor, io.BytesIO]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options: dict[str, Any] = {"slot": 0, "sync_every": 3, "overlap_steps": 1, "fragments": 2, "codec": "int8"}
        with LibraryIsland(model, optimizer, synchronizer=url, **options) as island:
            if saved is not None:
                assert island.load_state_dict(torch.load(saved, weights_only=True, map_location="cpu"))
            while island.num_steps < num_steps:
                batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(island.num_steps)).to(device)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                island.step(tokens=16)
            file = io.BytesIO()
            torch.save(island.state_dict(), file)
            file.seek(0)
            return flatten_module(model), file

    expected, _ = train(serve(tmp_path / "a"), 14)
    url = serve(tmp_path / "b")
    _, saved = train(url, 7)
    continued, _ = train(url, 14, saved)
    assert torch.equal(continued, expected)


@pytest.mark.integration
@devices
def test_a_worker_trains_and_syncs_there(serve: Serve, start: Start, tmp_path: Path, device: str) -> None:
    worker = start(serve(tmp_path / "sync", quorum=1), device=device, precision="bf16", num_fragments=2)
    assert worker.wait_for(ReadyEvent).num_fragments == 2
    first = worker.progress(lambda p: p.phase is Phase.INNER and p.loss is not None)
    for number in range(4):
        worker.progress(lambda p: p.inner_steps_since_sync > 5)
        assert worker.sync(number).outcome is SyncOutcome.APPLIED
    last = worker.progress(lambda p: p.step > first.step + 60)
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < first.loss


@pytest.mark.integration
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_a_worker_that_is_told_to_use_a_gpu_that_is_not_there_says_so(
    serve: Serve, start: Start, tmp_path: Path
) -> None:
    worker = start(serve(tmp_path / "sync", quorum=1), device="cuda:1")
    failed = worker.wait_for(FailedEvent)
    assert "device: cuda:1: torch sees no CUDA device here" in failed.message
    assert worker.finish() == failed.exit_code == ConfigError.exit_code


@pytest.fixture
def store() -> Any:
    from torch._C._distributed_c10d import HashStore

    return HashStore()


@devices
def test_a_group_has_the_tensors_of_both_sides(store: Any, device: str) -> None:
    group = open_group(store, rank=0, num_ranks=1, timeout_s=TIMEOUT_S, device=choose_device(device))
    for where in ("cpu", device):
        tensor = torch.ones(10, device=where)
        group.start_sum(tensor).wait()
        assert tensor.sum().item() == 10
        assert group.broadcast(tensor).sum().item() == 10
    assert group.agrees(7)
    assert group.close()


TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]
pairs = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])


@pytest.mark.integration
@pairs
def test_ranks_take_the_same_steps_and_survive_the_death_of_one(ranks: Ranks, device: str) -> None:
    two = ranks(2)
    assert all_do(two, "open", 1, 2, device) == ["open"] * 2
    first, second = all_do(two, "train", 10, 2, False)
    assert first.fingerprint == second.fingerprint
    assert first.losses == second.losses
    living, dying = two
    living.tell("sum", 1_000_000)
    dying.kill()
    assert living.answer().startswith("PeerLostError")
    assert all_do([living], "close") == ["closed"]
