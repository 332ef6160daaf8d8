"""A calibration made offline: what recorded traffic says about P(violation | load, phase), for ``--calibration``.

JSON, replaced whole. It is about one objective: counts for another would be wrong numbers that look right, so that a
sidecar with another ``--slo`` refuses the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from service.errors import InputError, UnavailableError
from service.files import replace_file
from sidecar.calibrator import Calibrator, CalibratorState
from sidecar.forecast.state import Document
from sidecar.learned import load_document, objective_text
from sidecar.slo import Slo

RECORDED_REQUESTS = 5000.0
"""Per phase, recorded data weigh at most as much as so many live requests: a fleet that changed outweighs them soon."""
MAKE_IT = "make it with wadiloco calibrate"


class CalibrationSource(Document):
    """One file that the counts come from."""

    path: str
    kind: Literal["journal", "requests", "state"]
    intervals: int = Field(ge=0)
    """Intervals between two scrapes that were counted; 0 for a state, which keeps sums."""
    requests: float = Field(ge=0)


class CalibrationFile(Document):
    """The file's content."""

    format: Literal["wadiloco-calibration-1"] = "wadiloco-calibration-1"
    made_at_s: float = Field(ge=0)
    """Unix time."""
    slo: str
    """What the violations are about, as `objective_text`."""
    sources: tuple[CalibrationSource, ...]
    calibration: CalibratorState


def write_calibration(path: Path, content: CalibrationFile) -> None:
    """Replace the file.

    Raises:
        UnavailableError: it cannot be written; the old file is untouched.
    """
    try:
        replace_file(path, [content.model_dump_json(indent=2).encode(), b"\n"], follow_links=True)
    except OSError as exc:
        raise UnavailableError(
            f"cannot write {path}: {exc.strerror or exc}",
            field="out",
            remedy="name a file in a folder that exists and has space",
        ) from exc


def read_calibration(path: Path, slo: Slo) -> CalibrationFile:
    """A calibration for this objective.

    Raises:
        InputError: it cannot be read, is no calibration of this version, or is about another objective.
    """
    content = load_document(path, CalibrationFile, field="calibration", kind="calibration file", remedy=MAKE_IT)
    wanted = objective_text(slo)
    if content.slo != wanted:
        raise InputError(
            f"{path} is about {content.slo}, this sidecar about {wanted}",
            field="calibration",
            remedy=f"set --slo {content.slo}, or calibrate for {wanted}",
        )
    try:
        Calibrator().restore(content.calibration)
    except ValueError as exc:
        raise InputError(f"{path}: {exc}", field="calibration", remedy=MAKE_IT) from exc
    return content
