"""A finding of the doctor: a check, how it ended, and what to change.

Each check says ok, warn or fail. Fail: the sidecar, or what was asked for by an option, cannot work as things are.
Warn: it works with less, and the finding says with what. What a server itself says is untrusted text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_TEXT = 200


class Check(StrEnum):
    REACHABLE = "reachable"
    VERSION = "version"
    METRICS = "metrics"
    SIGNALS = "signals"
    SLO = "slo"
    SCRAPE = "scrape"
    ENGINE = "engine"
    PROCESSES = "processes"
    HOST = "host"
    FOLDER = "gate folder"
    MIDDLEWARE = "middleware"
    PLUGIN = "plugin"
    TRAINERS = "trainers"
    CLOCK = "clock"
    SIDECAR = "sidecar"
    CONTROLLER = "controller"


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    check: Check
    status: Status
    message: str
    remedy: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def worst(found: Iterable[Finding]) -> Status:
    return max((finding.status for finding in found), key=list(Status).index, default=Status.OK)


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """``text`` without what could steer a terminal, cut to a line."""
    cleaned = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    cleaned = " ".join(cleaned.split())
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def count(num: int, noun: str, plural: str = "s") -> str:
    return f"{num} {noun}{plural if num != 1 else ''}"
