"""A training fleet of this machine: controller, synchronizer, agents and spares, each kept up as an init system would.

Whatever ends is started again on what it left, `restart_after_s` later; whatever does not answer for ``liveness_s`` is
killed and started again. A worker is its agent's to start again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from replay.chaos.config import ChaosSettings
from replay.chaos.disk import mount_disk, unmount_disk
from replay.chaos.faults import Role
from replay.chaos.members import Member
from replay.chaos.network import Network
from replay.chaos.procfs import is_below, send
from replay.chaos.shared_memory import vault_folder
from replay.fleet import as_arguments
from replay.processes import Child, Children, answers, free_ports, wait_for
from service.child import module_command, module_environment

logger = logging.getLogger(__name__)

START_DEADLINE_S = 60.0
LOOPBACK = "127.0.0.1"
CONTROLLER, SYNCHRONIZER = 0, 1
"""Places of the two among ports and plugs; agents follow."""
TICK_S = 0.1


class LocalFleet:
    """Use as a context manager; `start` starts the processes."""

    def __init__(
        self, settings: ChaosSettings, *, with_network: bool, with_disks: frozenset[Role], children: Children
    ) -> None:
        self._settings = settings
        self._children = children
        self._with_network = with_network
        self._with_disks = with_disks
        self._network: Network | None = None
        self._stack = ExitStack()
        self._running: dict[str, Child] = {}
        self._started_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._workers: dict[str, set[int]] = {}
        self.token: str | None = None
        self.members: list[Member] = []

    def __enter__(self) -> Self:
        settings = self._settings
        num = 2 + settings.islands + settings.spares
        ports = free_ports(num, settings.port_range)
        if self._with_network:
            self._network = self._stack.enter_context(Network(num))
            self.token = secrets.token_hex(16)  # what listens beyond loopback needs one
        roles = [Role.CONTROLLER, Role.SYNCHRONIZER, *[Role.AGENT] * (num - 2)]
        names = ["controller", "synchronizer", *(f"agent-{index}" for index in range(num - 2))]
        named = "vault_dir" in settings.train_options
        vaults = None if named else self._stack.enter_context(vault_folder())
        for plug, (name, role, port) in enumerate(zip(names, roles, ports, strict=True)):
            host = self._network.address_of(plug) if self._network else LOOPBACK
            directory = (settings.out / "fleet" / name).absolute()
            directory.mkdir(parents=True)
            if role in self._with_disks:
                mount_disk(directory, settings.disk_mb)
                self._stack.callback(unmount_disk, directory)
            own = vaults / name if vaults is not None and role is Role.AGENT else None
            self.members.append(Member(name, role, f"http://{host}:{port}", directory, vaults=own, plug=plug))
        return self

    def __exit__(self, *_: object) -> None:
        """Agents first, so that they can take their leave; a stopped process takes none."""
        for workers in self._workers.values():
            for pid in workers:
                self._end_left(pid)
        running = [*self._running.values()]
        self._children.stop([child for child in running if child.name.startswith("agent")])
        self._children.stop([child for child in running if not child.name.startswith("agent")])
        self._stack.close()

    @property
    def network(self) -> Network:
        assert self._network is not None, "planned without"
        return self._network

    async def start(self) -> None:
        """Start everything; agents that are to have the slots come before those that wait."""
        for member in self.members[:2]:
            self._start(member)
        for member in self.members[:2]:
            alive = functools.partial(answers, f"{member.url}/healthz")
            await wait_for(member.name, alive, children=self._children, deadline_s=START_DEADLINE_S)
        first_spare = 2 + self._settings.islands
        for member in self.members[2:first_spare]:
            self._start(member)
        for member in self.members[2:first_spare]:
            # The spares must not get there first.
            ready = functools.partial(answers, f"{member.url}/readyz")
            await wait_for(member.name, ready, children=self._children, deadline_s=2 * START_DEADLINE_S)
        for member in self.members[first_spare:]:
            self._start(member)

    def note_workers(self, name: str, pids: Sequence[int]) -> None:
        """Remember whom an agent started: they may outlive it."""
        self._workers.setdefault(name, set()).update(pids)

    async def tend(self, silent_s: dict[str, float]) -> None:
        for member in self.members:
            child = self._running[member.name]
            if child.exit_code is None:
                if self._is_dead(member, silent_s.get(member.name, 0.0)):
                    logger.warning("does not answer, killed name=%s pid=%d", member.name, child.process.pid)
                    child.process.kill()
                continue
            ended_s = self._ended_s.setdefault(member.name, time.monotonic())
            member.pid = None
            if time.monotonic() - ended_s >= self._settings.restart_after_s:
                del self._ended_s[member.name]
                self._start_again(member, child)

    def _is_dead(self, member: Member, silent_s: float) -> bool:
        """Whether it has not answered for too long; one that has not answered yet at all has longer."""
        since_start_s = time.monotonic() - self._started_s[member.name]
        return silent_s > self._settings.liveness_s if silent_s < since_start_s else since_start_s > START_DEADLINE_S

    def _start_again(self, member: Member, ended: Child) -> None:
        for pid in self._workers.pop(member.name, ()):
            self._end_left(pid)
        self._children.stop([ended])
        member.num_starts += 1
        self._start(member)
        logger.warning("started again name=%s starts=%d", member.name, member.num_starts)

    def _end_left(self, pid: int) -> None:
        """End a worker that outlived its agent, or that is stopped: an init system ends all that a service started."""
        if is_below(pid, os.getpid()):
            send(pid, signal.SIGKILL)

    def _start(self, member: Member) -> None:
        command = [*module_command("wadiloco"), *self._command(member)]
        if self._network is not None and member.plug is not None:
            command = self._network.command(member.plug, command)
        log = self._settings.out.absolute() / "fleet" / f"{member.name}.log"
        child = self._children.start(member.name, command, log=log, env=self._environment())
        self._running[member.name] = child
        self._started_s[member.name] = time.monotonic()
        member.pid = child.process.pid

    def _environment(self) -> dict[str, str]:
        tokens = {}
        if self.token is not None:
            tokens = {f"WADILOCO_{name}_TOKEN": self.token for name in ("CONTROLLER", "SYNCHRONIZER", "ISLAND")}
        return {**module_environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **tokens}

    def _command(self, member: Member) -> list[str]:
        address, _, port = member.url.removeprefix("http://").rpartition(":")
        listen = ["--host", address, "--port", port]
        match member.role:
            case Role.CONTROLLER:
                return ["controller", *listen, *self._controller_options(member)]
            case Role.SYNCHRONIZER:
                return ["synchronizer", *listen, *self._synchronizer_options(member)]
            case _:
                return ["island", *listen, *self._agent_options(member)]

    def _controller_options(self, member: Member) -> list[str]:
        settings = self._settings
        every = settings.sync_every
        return [
            *("--journal", str(member.directory / "journal.sqlite"), "--num-slots", str(settings.islands)),
            *("--mode", settings.mode, "--policy", "fixed_h", "--policy-params", json.dumps({"h": every})),
            *("--min-h", str(max(1, every // 2)), "--max-h", str(4 * every), "--tick-s", str(TICK_S)),
            *("--lease-timeout-s", str(settings.lease_timeout_s), "--sync-timeout-s", str(settings.sync_timeout_s)),
            *("--synchronizer-url", self.members[SYNCHRONIZER].url),
        ]

    def _synchronizer_options(self, member: Member) -> list[str]:
        settings = self._settings
        return [
            *("--directory", str(member.directory / "state"), "--quorum", str(settings.islands)),
            *("--round-timeout-s", str(settings.sync_timeout_s)),
        ]

    def _agent_options(self, member: Member) -> list[str]:
        settings = self._settings
        return [
            *("--agent-id", member.name, "--node", member.name, "--controller", self.members[CONTROLLER].url),
            *("--ranks", str(settings.ranks), "--seed", str(settings.train_seed)),
            *(() if member.vaults is None else ("--vault-dir", str(member.vaults))),
            *(() if settings.idle_priority else ("--no-idle-priority",)),
            *as_arguments(tuple(settings.train_options.items())),
        ]
