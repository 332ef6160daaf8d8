"""``wadiloco doctor``: look at one vLLM server, and say what to change.

Exit code 0 when nothing fails (warnings are no failure), 1 when something does, 2 for options that cannot work.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit

import httpx
from pydantic import Field, FilePath, SecretStr, field_validator, model_validator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.errors import ConfigError, InputError
from service.log import configure_logging
from service.settings import ServiceSettings, Settings, load_settings
from sidecar.config import check_base_url
from sidecar.doctor_checks import Finding, Status, worst
from sidecar.doctor_evidence import Evidence, GateEvidence, ServerEvidence
from sidecar.doctor_findings import findings
from sidecar.doctor_gate import find_gate, look_at_gate
from sidecar.doctor_probe import Probe
from sidecar.slo import parse_slo

FAILED = 1
STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


class DoctorSettings(Settings):
    """Look at one vLLM server, and say what to change before a sidecar and an island work beside it."""

    service: ClassVar[str] = "doctor"

    log_level: str = Field(default="error", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error."""
    vllm: str
    """Base URL of the vLLM server, such as http://127.0.0.1:8000."""
    slo: str = "e2e:1s"
    """Objective that you mean to keep, such as e2e:200ms, ttft:0.5s or itl:50ms."""
    gate: Path | None = None
    """Folder of the server's gate (its WADILOCO_GATE_DIR); by default where the plugin puts it."""
    sidecar: str | None = None
    """Base URL of the server's sidecar, to look at it too."""
    controller: str | None = None
    """Base URL of the controller, to look at it too."""
    metric_prefix: str = Field(default="vllm:", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")
    """What the server's series begin with; ray_vllm_ under Ray Serve."""
    timeout_s: float = Field(default=5.0, ge=0.1, le=60)
    """Longest wait for one answer."""
    watch_s: float = Field(default=2.0, ge=0.5, le=600)
    """How long the server's counters are watched."""
    token: SecretStr | None = None
    """Bearer token of sidecar and controller."""
    tls_ca: FilePath | None = None
    """CA (PEM) that certificates must chain to."""
    tls_cert: FilePath | None = None
    """Client certificate (PEM), where one is asked for; needs --tls-key and --tls-ca."""
    tls_key: FilePath | None = None
    """Private key (PEM) of --tls-cert."""
    as_json: bool = False
    """Print the findings as JSON instead of a table; --json for short."""

    @field_validator("vllm", "sidecar", "controller")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else check_base_url(url)

    @field_validator("slo")
    @classmethod
    def _check_slo(cls, text: str) -> str:
        try:
            return str(parse_slo(text))
        except InputError as exc:
            raise ValueError(f"{exc.message}: {exc.remedy}") from exc

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        return self

    @property
    def access(self) -> ServiceSettings:
        return ServiceSettings(token=self.token, tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key)


def main(argv: Sequence[str]) -> int:
    settings = load_settings(DoctorSettings, argv)
    configure_logging(settings.log_level)
    found = findings(asyncio.run(gather(settings)), parse_slo(settings.slo))
    if settings.as_json:
        sys.stdout.write(as_document(settings, found) + "\n")
    else:
        show(found, Console())
    return FAILED if worst(found) is Status.FAIL else 0


async def gather(settings: DoctorSettings) -> Evidence:
    """Look at everything, the peers at the same time as the server.

    Raises:
        ConfigError: a TLS file cannot be used.
    """
    probe = Probe(settings.access, timeout_s=settings.timeout_s)
    peers = [(name, url) for name in ("sidecar", "controller") if (url := getattr(settings, name)) is not None]
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(probe.peer(name, url)) for name, url in peers]
            server = await probe.server(settings.vllm, metric_prefix=settings.metric_prefix, watch_s=settings.watch_s)
    except* httpx.InvalidURL as failed:
        raise ConfigError(
            f"not a URL: {failed.exceptions[0]}", field="vllm", remedy="write http://HOST:PORT"
        ) from failed
    except* OSError as failed:  # what a TLS context raises for files that are no certificate or key
        raise ConfigError(
            f"a TLS file cannot be used: {failed.exceptions[0]}", field="tls_ca", remedy="give PEM files"
        ) from failed
    gate = _gate_of(server, settings)
    return Evidence(server=server, gate=gate, peers=tuple(task.result() for task in asked))


def _gate_of(server: ServerEvidence, settings: DoctorSettings) -> GateEvidence | None:
    if not server.is_local:
        return None
    parts = urlsplit(settings.vllm)
    directory = settings.gate or find_gate(parts.port or (443 if parts.scheme == "https" else 80))
    return look_at_gate(directory, is_required=settings.gate is not None, now_ns=time.monotonic_ns(), t_s=time.time())


def as_document(settings: DoctorSettings, found: list[Finding]) -> str:
    """For machines."""
    body = {
        "vllm": settings.vllm,
        "slo": settings.slo,
        "status": worst(found).value,
        "findings": [
            {
                "check": finding.check.value,
                "status": finding.status.value,
                "message": finding.message,
                "remedy": finding.remedy,
                "details": finding.details,
            }
            for finding in found
        ],
    }
    return json.dumps(body, indent=2, allow_nan=False)


def show(found: list[Finding], console: Console) -> None:
    """A row per check, the remedy beneath; nothing of a server's own words is taken for markup."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        said = Text(finding.message)
        if finding.remedy is not None:
            said.append(f"\n→ {finding.remedy}", style="italic")
        table.add_row(Text(finding.status, style=STYLES[finding.status]), Text(finding.check), said)
    console.print(table)
    counts = {status: sum(finding.status is status for finding in found) for status in Status}
    console.print(
        f"{counts[Status.OK]} ok, {counts[Status.WARN]} to know, {counts[Status.FAIL]} to fix", highlight=False
    )
