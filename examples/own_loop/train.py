"""A plain PyTorch loop that is an island: the lines with ``island`` in them are all that it takes.

``python train.py --synchronizer http://127.0.0.1:9600 --slot 0``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from diloco import Island
from diloco.data import ShardOrder

NUM_SAMPLES = 4096
NUM_SHARDS = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the first island to come offers its parameters, all others start from those
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
    parser.add_argument("--checkpoint", type=Path, default=Path("island.pt"))
    options = parser.parse_args(argv)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    points, targets = make_points()
    order = ShardOrder(NUM_SAMPLES, slot=options.slot, num_shards=NUM_SHARDS, seed=0, batch_size=64)

    with Island(model, optimizer, order, synchronizer=options.synchronizer, slot=options.slot, sync_every=50) as island:
        if options.checkpoint.exists():
            island.load_state_dict(torch.load(options.checkpoint, weights_only=True))
        while island.num_steps < options.steps:
            batch = next(order)
            loss = functional.mse_loss(model(points[batch]).squeeze(1), targets[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if island.step(tokens=len(batch)):
                print(f"step {island.num_steps} version {island.version} loss {loss.item():.4f}", flush=True)
        torch.save(island.state_dict(), options.checkpoint)


if __name__ == "__main__":
    main()
