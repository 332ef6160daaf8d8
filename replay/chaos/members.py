"""The processes of a fleet that can be hit, started here or given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from replay.chaos.faults import Role
from replay.chaos.procfs import parent_of
from service.errors import ConfigError, UnavailableError
from service.settings import Url


@dataclass(eq=False, slots=True)
class Member:
    """A controller, a synchronizer or an agent."""

    name: str
    role: Role
    url: str
    directory: Path
    """Where its files are."""
    vaults: Path | None = None
    """Where an agent's snapshots are, if that is known."""
    pid: int | None = None
    """None while it is not running."""
    plug: int | None = None
    """Its place in the network, where there is one."""
    num_starts: int = 1
    own: bool = True
    """Whether it was started here."""


class Fleet(Protocol):
    """What is hit and watched."""

    @property
    def members(self) -> Sequence[Member]: ...

    async def tend(self, silent_s: dict[str, float]) -> None:
        """Start again what ended; ``silent_s`` has for how long each member has not answered."""
        ...


def one(fleet: Fleet, role: Role) -> Member:
    """The controller, or the synchronizer."""
    return next(member for member in fleet.members if member.role is role)


def agents(fleet: Fleet) -> list[Member]:
    return [member for member in fleet.members if member.role is Role.AGENT]


class GivenProcess(BaseModel):
    """One process of a given fleet."""

    model_config = ConfigDict(extra="forbid")

    url: Url
    pid: int = Field(gt=1)
    directory: Path = Path()


class GivenSpec(BaseModel):
    """The file of a given fleet: ``{"controller": {"url": …, "pid": …}, "synchronizer": {…}, "agents": [{…}]}``."""

    model_config = ConfigDict(extra="forbid")

    controller: GivenProcess
    synchronizer: GivenProcess
    agents: list[GivenProcess] = Field(min_length=1)


@dataclass(slots=True)
class GivenFleet:
    """A fleet that somebody else started, and starts again where that is needed."""

    members: list[Member] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> GivenFleet:
        """Raises `ConfigError` for a file that is none, `UnavailableError` for a process that is not there."""
        try:
            raw: Any = json.loads(path.read_text())
            spec = GivenSpec.model_validate(raw)
        except (OSError, ValueError) as exc:
            why = str(exc.errors()[0]["msg"]) if isinstance(exc, ValidationError) else str(exc)
            raise ConfigError(f"{path} names no fleet: {why}", field="fleet", remedy="see docs/chaos.md") from exc
        named = [
            ("controller", Role.CONTROLLER, spec.controller),
            ("synchronizer", Role.SYNCHRONIZER, spec.synchronizer),
        ]
        named += [(f"agent-{index}", Role.AGENT, agent) for index, agent in enumerate(spec.agents)]
        members = [
            Member(name=name, role=role, url=given.url, directory=given.directory, pid=given.pid, own=False)
            for name, role, given in named
        ]
        gone = next((member for member in members if parent_of(member.pid or 0) is None), None)
        if gone is not None:
            raise UnavailableError(f"{gone.name}: no process {gone.pid} on this machine", field="fleet")
        return cls(members)

    async def tend(self, silent_s: dict[str, float]) -> None:
        """Nothing is started again here; what ended is known to be gone."""
        for member in self.members:
            if member.pid is not None and parent_of(member.pid) is None:
                member.pid = None
