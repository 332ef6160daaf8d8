"""What a rank worker is told, for tests: a model that takes a step in a millisecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diloco.protocol import WorkerConfig


def write_corpus(directory: Path) -> Path:
    """A text that there is something to learn from."""
    path = directory / "corpus.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
    return path


def tiny_config(corpus: Path, synchronizer_url: str, **overrides: Any) -> WorkerConfig:
    """The configuration of slot 0, but for what is given."""
    told: dict[str, Any] = {
        "slot": 0,
        "seed": 0,
        "num_layers": 1,
        "num_heads": 2,
        "width": 32,
        "context": 16,
        "data": (corpus,),
        "data_shards": 2,
        "batch_size": 4,
        "lr": 3e-3,
        "warmup_steps": 5,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "cores": (),
        "threads": 1,
        "idle_priority": False,
        "sync_priority": "normal",
        "synchronizer_url": synchronizer_url,
        "timeout_s": 5.0,
    }
    return WorkerConfig(**(told | overrides))
