"""An operator's order to pause or free the trainers of a gate, kept in the gate's folder.

It outlives the sidecar that took it: whichever sidecar writes that gate next obeys it, until ``auto`` takes it back.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sidecar.schema import PaceMode
from sidecar.vllm_plugin.files import open_regular

logger = logging.getLogger(__name__)

ORDER_FILE = "pace-order"
MAX_BYTES = 64


def read_order(directory: Path) -> PaceMode:
    """The order in force; ``auto`` when there is none, or none that can be read."""
    path = directory / ORDER_FILE
    try:
        descriptor = open_regular(path, os.O_RDONLY)
        try:
            text = os.read(descriptor, MAX_BYTES).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
        return PaceMode(text)
    except FileNotFoundError:
        return PaceMode.AUTO
    except (OSError, ValueError) as exc:
        logger.warning("no order can be read from file=%s, pace mode=auto: %s", path, exc)
        return PaceMode.AUTO


def keep_order(directory: Path, mode: PaceMode) -> None:
    """Keep an order, or forget it with ``auto``.

    Raises:
        OSError: the folder does not let it.
    """
    path = directory / ORDER_FILE
    if mode is PaceMode.AUTO:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(f"{ORDER_FILE}.new")
    descriptor = open_regular(new, os.O_WRONLY | os.O_CREAT)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{mode}\n".encode())
    finally:
        os.close(descriptor)
    new.replace(path)
