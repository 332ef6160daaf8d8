"""What a sidecar has learned about its server, in one file that survives a restart.

The file is JSON, replaced whole (a new file beside it, synced, renamed over it). One that cannot be used is no reason
not to start: the sidecar says so in one line and begins cold.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from sidecar.calibrator import CalibratorState
from sidecar.forecast.state import BurstState, Document, ForecasterState

logger = logging.getLogger(__name__)

# What a sidecar writes is under 1 MB; a file beyond this is not ours.
MAX_FILE_BYTES = 16 << 20


class LearnedState(Document):
    """The file's content."""

    format: Literal["wadiloco-sidecar-1"] = "wadiloco-sidecar-1"
    t_s: float = Field(ge=0)
    """Unix time of the newest observation."""
    server_id: str
    arrivals: ForecasterState
    in_engine: ForecasterState
    bursts: BurstState
    calibration: CalibratorState


def read_learned(path: Path) -> LearnedState | None:
    """What the file holds; None, with a line in the log, when there is none or it cannot be used."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            logger.warning("cold start: %s is over %d bytes, no state file of a sidecar", path, MAX_FILE_BYTES)
            return None
        return LearnedState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        logger.info("cold start: no state file yet at %s", path)
    except OSError as exc:
        logger.warning("cold start: %s cannot be read: %s", path, exc.strerror or exc)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        logger.warning("cold start: %s is no state file of this version: %s: %s", path, where, first["msg"])
    return None


def write_learned(path: Path, learned: LearnedState) -> None:
    """Replace the file.

    Raises:
        OSError: it cannot be written; the old file is untouched.
    """
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            file.write(learned.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
