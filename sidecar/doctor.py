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
from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.client import ClientOptions, client_options
from service.errors import InputError
from service.log import configure_logging
from service.settings import load_settings
from sidecar.doctor_checks import Finding, Status, worst
from sidecar.doctor_evidence import Evidence, GateEvidence, ServerEvidence
from sidecar.doctor_findings import findings
from sidecar.doctor_gate import find_gate, look_at_gate
from sidecar.doctor_probe import Probe
from sidecar.slo import parse_slo
from sidecar.source.transport import tls_context
from sidecar.vllm_plugin.identity import DEFAULT_PORT
from sidecar.vllm_settings import VllmSettings, check_base_url

FAILED = 1
STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


class DoctorSettings(VllmSettings):
    """Look at one vLLM server, and say what to change before a sidecar and an island work beside it."""

    service: ClassVar[str] = "doctor"

    log_level: str = Field(default="error", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error."""
    slo: str = "e2e:1s"
    """Objective that you mean to keep, such as e2e:200ms, ttft:0.5s or itl:50ms."""
    gate: Path | None = None
    """Folder of the server's gate (its WADILOCO_GATE_DIR); by default where the plugin puts it."""
    sidecar: str | None = None
    """Base URL of the server's sidecar, to look at it too."""
    controller: str | None = None
    """Base URL of the controller, to look at it too."""
    timeout_s: float = Field(default=5.0, ge=0.1, le=60)
    """Longest wait for one answer."""
    watch_s: float = Field(default=2.0, ge=0.5, le=600)
    """How long the server's counters are watched."""
    as_json: bool = False
    """Print the findings as JSON instead of a table; --json for short."""

    @field_validator("sidecar", "controller")
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
    probe, context, peers = Probe(timeout_s=settings.timeout_s), tls_context(settings), _peers(settings)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(probe.peer(name, options)) for name, options in peers.items()]
        server = await probe.server(settings, context, watch_s=settings.watch_s)
    gate = _gate_of(server, settings)
    return Evidence(server=server, gate=gate, peers=tuple(task.result() for task in asked))


def _peers(settings: DoctorSettings) -> dict[str, ClientOptions]:
    """How to reach the sidecar and the controller, as far as they are named."""
    named = {"sidecar": settings.sidecar, "controller": settings.controller}
    return {
        name: client_options(settings, url, timeout_s=settings.timeout_s)
        for name, url in named.items()
        if url is not None
    }


def _gate_of(server: ServerEvidence, settings: DoctorSettings) -> GateEvidence | None:
    if not server.is_local:
        return None
    directory = settings.gate or find_gate(gate_port(settings))
    return look_at_gate(directory, is_required=settings.gate is not None, now_ns=time.monotonic_ns(), t_s=time.time())


def gate_port(settings: DoctorSettings) -> int:
    """What the plugin names the gate's folder after: that of vLLM's --port, which has one over a Unix socket too."""
    if settings.vllm_socket is not None:
        return DEFAULT_PORT
    parts = urlsplit(settings.vllm)
    return parts.port or (443 if parts.scheme == "https" else 80)


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
    arrow = "->" if console.options.ascii_only else "→"
    for finding in found:
        said = Text(finding.message)
        if finding.remedy is not None:
            said.append(f"\n{arrow} {finding.remedy}", style="italic")
        table.add_row(Text(finding.status, style=STYLES[finding.status]), Text(finding.check), said)
    console.print(table)
    counts = {status: sum(finding.status is status for finding in found) for status in Status}
    console.print(
        f"{counts[Status.OK]} ok, {counts[Status.WARN]} to know, {counts[Status.FAIL]} to fix", highlight=False
    )
