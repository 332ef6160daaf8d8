"""Settings of ``wadiloco island --dry-run``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from diloco.bandwidth import bytes_per_s
from diloco.schema import CodecName
from service.settings import ServiceSettings


def _checked(text: str) -> str:
    bytes_per_s(text)
    return text


Bandwidth = Annotated[str, AfterValidator(_checked)]
DRY_RUN_OPTIONS = ("dry_run_steps", "bandwidth", "pull_codec", "as_json")


class DryRunSettings(ServiceSettings):
    """What a dry run tells, and how."""

    dry_run: bool = False
    """Build the model, say what it takes (parameters, memory, bytes and time of an outer sync), and exit. Asks nobody
    on the network."""
    dry_run_steps: int = Field(default=0, ge=0, le=100_000)
    """For --dry-run: take so many inner steps too, and say how long one takes."""
    bandwidth: Bandwidth = "1Gbit/s"
    """For --dry-run: link to the synchronizer that times are computed for, such as 250Mbit/s, 10Gbit/s or 125MB/s."""
    pull_codec: CodecName = "fp32"
    """For --dry-run: the synchronizer's --pull-codec."""
    as_json: bool = False
    """For --dry-run: print JSON; --json for short."""

    @model_validator(mode="after")
    def _check_dry_run(self) -> Self:
        given = [name for name in DRY_RUN_OPTIONS if name in self.model_fields_set]
        if given and not self.dry_run:
            raise ValueError(f"{given[0]} is for a dry run: give --dry-run, or leave it out")
        return self
