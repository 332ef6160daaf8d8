"""Bytes that change by themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from service.errors import UnavailableError

LEAST_BYTES = 64
"""Of a file that is worth it."""


def files_of(directory: Path, pattern: str) -> list[Path]:
    """The regular files that match, in order; ``pattern`` may be absolute."""
    root = Path(pattern).anchor
    found = Path(root).glob(pattern[len(root) :]) if root else directory.glob(pattern)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def flip_bytes(files: Sequence[Path], *, num_bytes: int, seed: int) -> tuple[Path, list[int]]:
    """Flip every bit of some bytes of one of the files; which file, and at which offsets.

    Raises:
        UnavailableError: none of them has anything in it.
    """
    rng = random.Random(f"flip/{seed}")
    worth = [path for path in files if path.stat().st_size >= LEAST_BYTES]
    if not worth:
        raise UnavailableError("there is no file to corrupt", field="corrupt_files", remedy="give ROLE=GLOB")
    chosen = rng.choice(worth)
    size = chosen.stat().st_size
    offsets = sorted(rng.sample(range(size), min(num_bytes, size)))
    with chosen.open("r+b", buffering=0) as file:
        for offset in offsets:
            file.seek(offset)
            value = file.read(1)
            file.seek(offset)
            file.write(bytes([value[0] ^ 0xFF]))
    return chosen, offsets
