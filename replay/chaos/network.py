"""A network on this machine with a plug for each process, so that one can be pulled.

Each process lives in a network namespace of its own, connected to a bridge:

    this command ── bridge 10.x.y.1 ──┬── plug 0 ── namespace, 10.x.y.2
                                      └── plug 1 ── namespace, 10.x.y.3

A plug that is pulled (its link is down) loses every packet in both directions, and nobody is told: as a cable does. All
of it has the number of this process in its name, so that two such fleets do not meet.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from service.errors import UnavailableError

COMMAND_DEADLINE_S = 20.0
FIRST_NET = 64
MAX_PLUGS = 200


@dataclass(frozen=True, slots=True)
class Plan:
    """Names and addresses, and the commands that make them. Pure."""

    number: int
    """Of this fleet: makes names and addresses its own."""

    @property
    def bridge(self) -> str:
        return f"wdb{self.number:x}"

    @property
    def host(self) -> str:
        """Address of this command."""
        return self.address_of(-1)

    def namespace(self, plug: int) -> str:
        return f"wd{self.number:x}-{plug}"

    def link(self, plug: int) -> str:
        """The end of the cable at the bridge; 15 characters are the most that Linux allows."""
        return f"wd{self.number:x}v{plug}"

    def address_of(self, plug: int) -> str:
        return f"10.{FIRST_NET + self.number // 256 % 128}.{self.number % 256}.{plug + 2}"

    def make_bridge(self) -> list[list[str]]:
        return [
            ["link", "add", self.bridge, "type", "bridge"],
            ["addr", "add", f"{self.host}/24", "dev", self.bridge],
            ["link", "set", self.bridge, "up"],
        ]

    def make_plug(self, plug: int) -> list[list[str]]:
        name, link, inside = self.namespace(plug), self.link(plug), ["netns", "exec", self.namespace(plug), "ip"]
        return [
            ["netns", "add", name],
            ["link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name],
            ["link", "set", link, "master", self.bridge],
            ["link", "set", link, "up"],
            [*inside, "addr", "add", f"{self.address_of(plug)}/24", "dev", "eth0"],
            [*inside, "link", "set", "eth0", "up"],
            [*inside, "link", "set", "lo", "up"],
        ]

    def pull(self, plug: int) -> list[str]:
        return ["link", "set", self.link(plug), "down"]

    def put_back(self, plug: int) -> list[str]:
        return ["link", "set", self.link(plug), "up"]


def check_network() -> None:
    """Raises `UnavailableError` where no such network can be made."""
    remedy = "run as root with iproute2 installed, or leave partition out of kinds"
    if shutil.which("ip") is None:
        raise UnavailableError("the command ip is missing", field="kinds", remedy=remedy)
    if os.geteuid() != 0:
        raise UnavailableError("a partition needs network namespaces, which are root's", field="kinds", remedy=remedy)
    name = f"wdtry{os.getpid():x}"
    try:
        _ip(["netns", "add", name])
    except UnavailableError as exc:
        raise UnavailableError(f"no network namespace: {exc.message}", field="kinds", remedy=remedy) from exc
    _ip(["netns", "del", name])


@dataclass(slots=True)
class Network:
    """A `Plan` that is carried out; use as a context manager."""

    num_plugs: int
    plan: Plan = field(default_factory=lambda: Plan(os.getpid() % (128 * 256)))

    def __enter__(self) -> Self:
        assert self.num_plugs <= MAX_PLUGS
        try:
            self._run(self.plan.make_bridge())
            for plug in range(self.num_plugs):
                self._run(self.plan.make_plug(plug))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address_of(self, plug: int) -> str:
        return self.plan.address_of(plug)

    def command(self, plug: int, command: Sequence[str]) -> list[str]:
        """The same command within a plug's namespace, as the same process."""
        return ["ip", "netns", "exec", self.plan.namespace(plug), *command]

    def pull(self, plug: int) -> None:
        self._run([self.plan.pull(plug)])

    def put_back(self, plug: int) -> None:
        self._run([self.plan.put_back(plug)])

    def close(self) -> None:
        """Take everything down that there is of it."""
        for plug in range(self.num_plugs):
            with contextlib.suppress(UnavailableError):
                self._run([["netns", "del", self.plan.namespace(plug)]])
            with contextlib.suppress(UnavailableError):
                self._run([["link", "del", self.plan.link(plug)]])
        with contextlib.suppress(UnavailableError):
            self._run([["link", "del", self.plan.bridge]])

    def _run(self, commands: Sequence[Sequence[str]]) -> None:
        for command in commands:
            _ip(command)


def _ip(arguments: Sequence[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - arguments are made here
            ["ip", *arguments],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UnavailableError(f"ip {' '.join(arguments)}: {exc}", field="kinds") from exc
    if done.returncode != 0:
        raise UnavailableError(f"ip {' '.join(arguments)}: {done.stderr.strip()}", field="kinds")
