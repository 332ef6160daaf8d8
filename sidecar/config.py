"""Settings of the sidecar."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, FilePath, SecretStr, field_validator, model_validator

from service.errors import InputError
from service.settings import ServiceSettings
from sidecar.schema import Name
from sidecar.slo import Slo, parse_slo

UNIX = "unix:"
MAX_SOCKET_PATH_BYTES = 107
"""Of sun_path on Linux, without its closing zero."""


class SidecarSettings(ServiceSettings):
    """One process beside one vLLM server: load, forecast, SLO accounts, samples for the controller."""

    service: ClassVar[str] = "sidecar"

    port: int = Field(default=9400, ge=0, le=65535)
    """TCP port to listen on; 0 takes a free one and logs it."""
    vllm: str
    """Base URL of the vLLM server, such as http://127.0.0.1:8000; or unix:/run/vllm.sock for its --uds."""
    vllm_ca: FilePath | None = None
    """CA (PEM) that the certificate of an https --vllm must chain to. Left out, it is --tls-ca, then the system's."""
    vllm_cert: FilePath | None = None
    """Client certificate (PEM) for an https --vllm that asks for one; needs --vllm-key. Left out, it is --tls-cert
    where the CA is --tls-ca."""
    vllm_key: FilePath | None = None
    """Private key (PEM) of --vllm-cert."""
    vllm_token: SecretStr | None = None
    """Bearer token for what stands before the server's /metrics; the fleet's --token is never sent there. Others on the
    host can read a command line: prefer the environment or --vllm-token-file."""
    vllm_token_file: FilePath | None = None
    """File that holds that token, read at every scrape."""
    server_id: Name = "unnamed"
    """Name of the server in the fleet; left out, it is host:port of --vllm, or this host and the path of its socket."""
    node: Name = Field(default_factory=lambda: _as_name(socket.gethostname()))
    """Host of the server; islands with the same node share its hardware. Left out, it is this host's name."""
    controller: str | None = None
    """Base URL of the controller that gets the samples; none are pushed when left out."""
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
    metric_prefix: str = Field(default="vllm:", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")
    """What the server's series begin with; ray_vllm_ under Ray Serve."""
    metric_replica: str | None = Field(default=None, min_length=1, max_length=256)
    """ReplicaId label of the one replica that counts, where a page of Ray Serve has several; left out, they add up."""
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

    @field_validator("vllm")
    @classmethod
    def _check_server(cls, url: str) -> str:
        return check_socket(url) if url.strip().startswith(UNIX) else check_base_url(url)

    @field_validator("controller")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else check_base_url(url)

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

    @model_validator(mode="after")
    def _check_way_to_server(self) -> Self:
        if (self.vllm_cert is None) != (self.vllm_key is None):
            raise ValueError("vllm_cert and vllm_key go together: give both or neither")
        if (self.vllm_ca or self.vllm_cert) and not self.vllm_base_url.startswith("https:"):
            raise ValueError("vllm_ca and vllm_cert are for TLS: give an https URL to vllm, or leave them out")
        if self.vllm_token is not None and self.vllm_token_file is not None:
            raise ValueError("vllm_token and vllm_token_file are two ways to give one token: leave one out")
        # Checked here and not at the field: the message of a field quotes its value.
        if self.vllm_token is not None and not is_token(self.vllm_token.get_secret_value().strip()):
            raise ValueError("vllm_token is empty or has characters that no header can hold: give printable ASCII")
        return self

    @property
    def scrape_longest_s(self) -> float:
        """The interval that a slow server is scraped at, at most."""
        return 5 * self.scrape_interval_s if self.scrape_interval_max_s is None else self.scrape_interval_max_s

    @property
    def vllm_socket(self) -> str | None:
        """Path of the server's Unix socket; None where it listens on TCP."""
        return self.vllm.removeprefix(UNIX) if self.vllm.startswith(UNIX) else None

    @property
    def vllm_base_url(self) -> str:
        """What paths of the server are relative to; over a Unix socket the host is a mere name."""
        return self.vllm if self.vllm_socket is None else "http://localhost"

    @property
    def objective(self) -> Slo:
        return parse_slo(self.slo)


def check_base_url(url: str) -> str:
    """``url`` without a trailing slash, if a base URL it is.

    Raises:
        ValueError: it is not an http(s) URL of a host.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"not a URL ({exc}): write http://HOST:PORT") from exc
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError("not an http or https URL of a host: write http://HOST:PORT")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("a base URL has no user, query or fragment: write http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/metrics"):
        raise ValueError("give the base URL without /metrics")
    return url.strip().rstrip("/")


def check_socket(address: str) -> str:
    """``unix:/path`` of a Unix socket, which need not exist yet.

    Raises:
        ValueError: the path is not absolute, or longer than the kernel takes.
    """
    path = _socket_path(address)
    if not path.startswith("/") or path.startswith("//") or "\0" in path:
        raise ValueError("not the absolute path of a Unix socket: write unix:/run/vllm.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"path of a Unix socket over {MAX_SOCKET_PATH_BYTES} bytes: start vLLM with a shorter --uds")
    return UNIX + path


def is_token(text: str) -> bool:
    """Whether ``text`` can stand in an Authorization header."""
    return re.fullmatch(r"[\x21-\x7e]+", text) is not None


def derive_server_id(url: str) -> str:
    """``host:port`` of a URL, as a name. What is not a URL gets one too: `check_base_url` is who refuses it."""
    if url.strip().startswith(UNIX):
        return _as_name(f"{socket.gethostname()}:{_socket_path(url)}")
    try:
        parts = urlsplit(url.strip())
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return _as_name(url)
    return _as_name(f"{parts.hostname}:{port}")


def _socket_path(address: str) -> str:
    path = address.strip().removeprefix(UNIX)
    return path.removeprefix("//") if path.startswith("///") else path


def _as_name(text: str) -> str:
    """``text`` with what a `Name` cannot hold replaced."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/-]", "-", text)[:128]
    return cleaned if cleaned[:1].isalnum() else f"host{cleaned}"[:128]
