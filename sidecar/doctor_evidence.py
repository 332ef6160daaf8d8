"""What the doctor saw of a server, of its gate's folder and of peers; `doctor_findings` judges it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sidecar.source.snapshot import ScrapeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvidence:
    """Over HTTP."""

    url: str
    host: str
    """Empty where the server listens on a Unix socket."""
    resolve_error: str = ""
    """Why the host has no address; then nothing else is known."""
    is_local: bool | None = None
    """Whether an address of the host is one of this machine's."""
    results: tuple[ScrapeResult, ...] = ()
    """One, if it was no good, else all of the time of watching."""
    skew_s: float | None = None
    """The server's wall clock minus this one's; None when it does not tell."""
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEvidence:
    """In the folder of the gate."""

    directory: Path
    is_required: bool
    """Named by an option, not guessed."""
    user: int
    exists: bool = False
    owner: int | None = None
    is_readable: bool = False
    is_writable: bool = False
    error: str = ""
    num_ingress: int = 0
    """Living API-server processes with the middleware."""
    in_flight: int = 0
    plugin_engines: int = 0
    """Engines whose steps a living plugin writes."""
    max_num_seqs: int | None = None
    num_trainers: int = 0
    ahead_s: float = 0.0
    """How far the newest heartbeat is in this process's future; 0 when it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEvidence:
    """A sidecar or controller."""

    name: str
    url: str
    problem: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    server: ServerEvidence
    gate: GateEvidence | None = None
    """None where there is none to look at: the server is on another host."""
    peers: tuple[PeerEvidence, ...] = ()
