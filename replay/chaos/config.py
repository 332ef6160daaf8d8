"""Settings of ``wadiloco chaos``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, FilePath, SecretStr, model_validator

from controller.schema import Mode
from replay.chaos.faults import Fault, FaultKind, Role, Shape, draw_plan, in_order, parse_fault
from service.errors import InputError
from service.settings import CommaSeparated, Settings


class ChaosSettings(Settings):
    """Start a training fleet on this machine, break it on purpose, and tell what each fault cost."""

    service: ClassVar[str] = "chaos"

    out: Path = Path("out/chaos")
    """Directory for chaos.json, chaos.md and what the fleet leaves."""
    fleet: FilePath | None = None
    """JSON file that names a running fleet of this machine, which is broken in place of one that is started here. What
    ends there, nobody here starts again."""
    token: SecretStr | None = None
    """Bearer token of a given fleet. Others on the host can read a command line: set it in the environment."""
    as_json: bool = False
    """Print the result as JSON instead of a report; --json for short."""

    islands: int = Field(default=2, ge=1, le=64)
    """Slots of the fleet that is started."""
    spares: int = Field(default=1, ge=0, le=64)
    """Agents that wait for a slot."""
    ranks: int = Field(default=1, ge=1, le=16)
    """Rank workers of each island."""
    mode: Mode = Mode.SYNCHRONOUS
    """Mode of the controller: synchronous or per_island."""
    sync_every: int = Field(default=20, ge=1)
    """Inner steps between two outer syncs."""
    lease_timeout_s: float = Field(default=5.0, ge=0.5, le=600)
    """Silence after which the controller calls an agent lost."""
    sync_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds after which islands give up on a round."""
    train_options: dict[str, str] = Field(default_factory=dict)
    """Options of wadiloco island, such as width=64 (repeat for more)."""
    idle_priority: bool = False
    """Let workers run only when nobody else wants the core, as they do beside a server."""
    train_seed: int = Field(default=0, ge=0)
    """Seed of the model's parameters and of the order of the data."""
    ports: Annotated[str, Field(pattern=r"^\d{1,5}-\d{1,5}$")] = "18500-18599"
    """FIRST-LAST: ports for the processes that are started here."""
    restart_after_s: float = Field(default=1.0, ge=0, le=3600)
    """Seconds after which a controller, synchronizer or agent that ended is started again, as an init system would."""
    liveness_s: float = Field(default=20.0, gt=0, le=3600)
    """Silence of its health check after which such a process is killed and started again."""
    disk_mb: int = Field(default=64, ge=8, le=65_536)
    """Size of the disk (a tmpfs) of each process whose disk is to be filled; that needs root."""

    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the plan: the same seed gives the same faults."""
    count: int | None = Field(default=None, ge=1, le=100_000)
    """Faults at random; by default as many as begin within duration_s, and 5 without that and without at."""
    duration_s: float | None = Field(default=None, gt=0, le=30 * 86400)
    """Seconds within which faults at random begin."""
    every_s: float = Field(default=15.0, gt=0, le=86400)
    """Mean time from one fault to the next; one waits until the one before is over."""
    kinds: CommaSeparated = ("kill",)
    """Of faults at random: kill, stop, freeze, slow, partition, corrupt, disk, memory, comma-separated."""
    targets: CommaSeparated = ("worker",)
    """Of faults at random: worker, agent, controller, synchronizer, comma-separated."""
    at: CommaSeparated = ()
    """One fault by plan, such as slot=1,step=40,kind=kill,target=worker (repeat for more); also time_s, rank and
    hold_s. In the environment several stand with commas between them, and the parts of one with colons."""
    hold_s: float = Field(default=5.0, gt=0, le=3600)
    """How long a fault lasts that ends by itself: stop, slow, partition, disk, memory."""
    slow_frac: float = Field(default=0.1, gt=0, lt=1)
    """Share of the time that a slow process may run."""
    corrupt_bytes: int = Field(default=16, ge=1, le=1 << 20)
    """Bytes that are flipped in a file."""
    corrupt_files: dict[str, str] = Field(default_factory=dict)
    """Where the files of a role are, as ROLE=GLOB; by default those in the directory of each process."""
    memory_mb: int = Field(default=256, ge=1, le=1 << 20)
    """Memory that is taken."""

    recover_within_s: float = Field(default=60.0, gt=0, le=86400)
    """A fault that is not over by then is a hang, and the command fails."""
    settle_s: float = Field(default=5.0, ge=0, le=3600)
    """Undisturbed training before the first fault, and after each."""
    poll_s: float = Field(default=0.1, ge=0.02, le=10)
    """Time between two looks at the fleet: what is measured is known to so much."""

    @property
    def port_range(self) -> range:
        first, last = (int(part) for part in self.ports.split("-"))
        return range(first, last + 1)

    @property
    def token_text(self) -> str | None:
        return self.token.get_secret_value() if self.token is not None else None

    def plan(self, shape: Shape) -> list[Fault]:
        """The faults of these settings against so many slots and ranks.

        Raises:
            InputError: one is none, or is out of that shape.
        """
        planned = [
            parse_fault(text, shape, hold_s=self.hold_s, seed=index + (self.seed << 8))
            for index, text in enumerate(self.at)
        ]
        if self.count is None and self.duration_s is None and planned:
            return in_order(planned)
        drawn = draw_plan(
            self.seed,
            shape,
            kinds=[FaultKind(kind) for kind in self.kinds],
            roles=[Role(role) for role in self.targets],
            every_s=self.every_s,
            hold_s=self.hold_s,
            count=5 if self.count is None and self.duration_s is None else self.count,
            duration_s=self.duration_s,
        )
        return in_order([*planned, *drawn])

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field, kind in (("kinds", FaultKind), ("targets", Role)):
            unknown = [word for word in getattr(self, field) if word not in set(kind)]
            if unknown or not getattr(self, field):
                raise ValueError(f"{field}: {unknown[0] if unknown else 'nothing'!r} is not one of {', '.join(kind)}")
        unknown = [role for role in self.corrupt_files if role not in set(Role)]
        if unknown:
            raise ValueError(f"corrupt_files: {unknown[0]!r} is not one of {', '.join(Role)}")
        if not 0 < self.port_range.start < self.port_range.stop <= 65536:
            raise ValueError(f"ports: {self.ports} is not a range FIRST-LAST within 1-65535")
        if self.fleet is None:
            try:
                self.plan(Shape(num_slots=self.islands, num_ranks=self.ranks))
            except InputError as exc:
                raise ValueError(f"{exc.field}: {exc.message}: {exc.remedy}") from exc
        return self
