"""What a sidecar has learned about its server, in one file that survives a restart.

The file is JSON, replaced whole (a new file beside it, synced, renamed over it). One that cannot be used is no reason
not to start: the sidecar says so in one line and begins cold.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError

from service.errors import InputError
from service.files import read_input, replace_file
from sidecar.calibrator import CalibratorState
from sidecar.forecast.state import BurstState, Document, ForecasterState
from sidecar.slo import Slo

logger = logging.getLogger(__name__)

# What a sidecar writes is under 1 MB; a file beyond this is not ours.
MAX_FILE_BYTES = 16 << 20


class LearnedState(Document):
    """The file's content."""

    format: Literal["wadiloco-sidecar-1"] = "wadiloco-sidecar-1"
    t_s: float = Field(ge=0)
    """Unix time of the newest observation."""
    server_id: str
    slo: str | None = None
    """What the calibration is about (`objective_text`); files from before it was kept do not say."""
    arrivals: ForecasterState
    in_engine: ForecasterState
    bursts: BurstState
    calibration: CalibratorState


def objective_text(slo: Slo) -> str:
    """What the violations of a calibration are about: thresholds, not the share of requests that must keep them."""
    thresholds, _, _ = str(slo).partition("@")
    return ",".join(sorted(thresholds.split(",")))


def read_learned(path: Path) -> LearnedState | None:
    """What the file holds; None, with a line in the log, when there is none or it cannot be used."""
    if not path.exists():
        logger.info("cold start: no state file yet at %s", path)
        return None
    try:
        return load_learned(path)
    except InputError as exc:
        logger.warning("cold start: %s", exc.message)
    return None


def load_learned(path: Path) -> LearnedState:
    """What the file holds.

    Raises:
        InputError: it cannot be read, or is no state file of this version.
    """
    return load_document(
        path, LearnedState, field="state_file", kind="state file", remedy="name the --state-file of a sidecar"
    )


D = TypeVar("D", bound=Document)


def load_document(path: Path, model: type[D], *, field: str, kind: str, remedy: str) -> D:
    """A file that a sidecar or ``wadiloco calibrate`` wrote.

    Raises:
        InputError: it cannot be read, is too large or no regular file, or is something else; ``field`` is the setting
            at fault.
    """
    content = read_input(path, max_bytes=MAX_FILE_BYTES, field=field, remedy=remedy)
    try:
        return model.model_validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise InputError(
            f"{path} is no {kind} of this version: {where}: {first['msg']}", field=field, remedy=remedy
        ) from exc


def write_learned(path: Path, learned: LearnedState) -> None:
    """Replace the file.

    Raises:
        OSError: it cannot be written, or what is there is no regular file; the old file is untouched.
    """
    replace_file(path, [learned.model_dump_json().encode()], follow_links=True)
