"""Settings of the sidecar."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from service.errors import InputError
from service.files import check_replaceable
from service.peers import split_urls
from service.settings import ServiceSettings
from sidecar.schema import Name
from sidecar.slo import Slo, parse_slo
from sidecar.vllm_settings import UNIX, VllmSettings, check_base_url, socket_path


class SidecarSettings(VllmSettings, ServiceSettings):
    """One process beside one vLLM server: load, forecast, SLO accounts, samples for the controller."""

    service: ClassVar[str] = "sidecar"

    port: int = Field(default=9400, ge=0, le=65535)
    """TCP port to listen on; 0 takes a free one and logs it."""
    server_id: Name = "unnamed"
    """Name of the server in the fleet; left out, it is host:port of --vllm, or this host and the path of its socket."""
    node: Name = Field(default_factory=lambda: _as_name(socket.gethostname()))
    """Host of the server; islands with the same node share its hardware. Left out, it is this host's name."""
    controller: str | None = None
    """Base URL of the controller that gets the samples, or several with commas between them, of which one leads; none
    are pushed when left out."""
    slo: str = "e2e:1s"
    """Objectives that a request must meet together, and the share of requests that must (99 % if left out), such as
    e2e:200ms or ttft:200ms,itl:50ms,e2e:2s@99.9%. Metrics: ttft, itl, tpot, e2e."""
    busy_requests: int = Field(default=8, ge=1, le=1_000_000)
    """Requests in the engine (running and waiting) at which the server counts as full."""
    scrape_interval_s: float = Field(default=1.0, ge=0.1, le=60)
    """Seconds between scrapes. A scrape costs vLLM's event loop some 5 ms."""
    scrape_interval_max_s: float | None = Field(default=None, ge=0.1, le=600)
    """Seconds between scrapes of a server that is slow to answer, at most; left out, five times --scrape-interval-s."""
    scrape_timeout_s: float = Field(default=1.0, ge=0.05, le=60)
    """Seconds after which a scrape counts as timed out: the server is saturated. Longer than the interval, a slow
    answer costs the scrapes that were due meanwhile."""
    gate: Path | None = None
    """Folder of the server's gate (its WADILOCO_GATE_DIR): the pace is written there for the trainer, and the load too
    where the server has no plugin. Left out, there is no gate."""
    window_s: float = Field(default=300.0, ge=10, le=3600)
    """Seconds of samples that /v1/load can show."""
    state_file: Path | None = None
    """File that keeps what was learned (forecasts, calibration) over a restart, written every minute and at the end;
    nothing is kept when left out."""
    calibration: Path | None = None
    """File of wadiloco calibrate: what recorded traffic says about SLO violations under load, to begin with until live
    requests say it better. What a state file has learned counts before it."""
    push_interval_s: float = Field(default=1.0, ge=0.1, le=60)
    """Seconds between batches to the controller."""
    push_queue_samples: int = Field(default=3600, ge=1, le=100_000)
    """Samples kept while the controller is away; the oldest are dropped beyond it."""

    @field_validator("controller")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else ",".join(check_base_url(one) for one in url.split(","))

    @field_validator("slo")
    @classmethod
    def _check_slo(cls, text: str) -> str:
        try:
            parse_slo(text)
        except InputError as exc:
            raise ValueError(f"{exc.message}: {exc.remedy}") from exc
        return text

    @field_validator("state_file")
    @classmethod
    def _check_state_file(cls, path: Path | None) -> Path | None:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{path} is a folder, or in none that exists: name a file in an existing folder")
        if path is not None:
            check_replaceable(path)
        return path

    @model_validator(mode="before")
    @classmethod
    def _derive_server_id(cls, values: dict[str, object]) -> dict[str, object]:
        if "server_id" not in values and isinstance(values.get("vllm"), str):
            return {**values, "server_id": derive_server_id(str(values["vllm"]))}
        return values

    @model_validator(mode="after")
    def _check_scrape(self) -> Self:
        if self.scrape_timeout_s > 10 * self.scrape_interval_s:
            raise ValueError(
                f"scrape_timeout_s {self.scrape_timeout_s:g} is over ten times scrape_interval_s "
                f"{self.scrape_interval_s:g}: one slow answer would hide ten; lower scrape_timeout_s"
            )
        if self.scrape_longest_s < self.scrape_interval_s:
            raise ValueError(
                f"scrape_interval_max_s {self.scrape_longest_s:g} is under scrape_interval_s "
                f"{self.scrape_interval_s:g}: raise it, or leave it out"
            )
        return self

    @property
    def scrape_longest_s(self) -> float:
        """The interval that a slow server is scraped at, at most."""
        return 5 * self.scrape_interval_s if self.scrape_interval_max_s is None else self.scrape_interval_max_s

    @property
    def controllers(self) -> tuple[str, ...]:
        return split_urls(self.controller or "")

    @property
    def objective(self) -> Slo:
        return parse_slo(self.slo)


def derive_server_id(url: str) -> str:
    """``host:port`` of a URL, as a name. What is not a URL gets one too: `check_base_url` is who refuses it."""
    if url.strip().startswith(UNIX):
        return _as_name(f"{socket.gethostname()}:{socket_path(url)}")
    try:
        parts = urlsplit(url.strip())
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return _as_name(url)
    return _as_name(f"{parts.hostname}:{port}")


def _as_name(text: str) -> str:
    """``text`` with what a `Name` cannot hold replaced."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/-]", "-", text)[:128]
    return cleaned if cleaned[:1].isalnum() else f"host{cleaned}"[:128]
