"""A plain DistributedDataParallel loop whose ranks are one island together.

``torchrun --nproc-per-node 2 train.py --synchronizer http://127.0.0.1:9600 --slot 0``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from diloco import Island
from diloco.data import ShardOrder

NUM_SAMPLES = 4096
NUM_SLOTS = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


def make_points() -> tuple[torch.Tensor, torch.Tensor]:
    """Points (samples, 16), and a number for each (samples,) that a small network can learn."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return points, (points[:, :8] * points[:, 8:]).sum(1).tanh()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synchronizer", default="http://127.0.0.1:9600")
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint", type=Path, default=Path("island"))
    options = parser.parse_args(argv)

    # With GPUs: "cpu:gloo,cuda:nccl", and the module on cuda:LOCAL_RANK.
    distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    checkpoint = options.checkpoint.with_suffix(f".{rank}.pt")

    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    points, targets = make_points()
    # Each rank of each island has a part of the data of its own.
    part = options.slot * num_ranks + rank
    order = ShardOrder(NUM_SAMPLES, slot=part, num_shards=NUM_SLOTS * num_ranks, seed=0, batch_size=32)

    with Island(
        model,
        optimizer,
        order,
        synchronizer=options.synchronizer,
        slot=options.slot,
        sync_every=25,
        fragments=2,
        process_group="world",
    ) as island:
        if checkpoint.exists():
            island.load_state_dict(torch.load(checkpoint, weights_only=True))
        while island.num_steps < options.steps:
            batch = next(order)
            loss = functional.mse_loss(model(points[batch]).squeeze(1), targets[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if island.step(tokens=len(batch)) and rank == 0:
                print(f"step {island.num_steps} version {island.version} loss {loss.item():.4f}", flush=True)
        torch.save(island.state_dict(), checkpoint)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
