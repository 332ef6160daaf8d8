"""The processes of one run: synchronizer, controller, a sidecar beside each server, an island beside each core.

A run begins from nothing (fresh journal, fresh parameters), so that policies differ in nothing but their decisions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from controller.schema import BudgetSpec, Fleet, PolicySpec, RoundPage, RoundRecord
from diloco.agent.config import IslandSettings
from diloco.schema import Phase
from replay.processes import Child, Children, answers, wait_for
from service.child import module_command, module_environment
from service.client import explain_response
from service.errors import ConfigError, UnavailableError
from service.settings import load_settings

SERVICE_DEADLINE_S = 60.0
ISLAND_DEADLINE_S = 120.0
REQUEST_TIMEOUT_S = 5.0
TICK_S = 0.25
SET_BY_REPLAY = frozenset(
    {"host", "port", "agent_id", "slot", "node", "server_id", "controller", "synchronizer", "seed", "cores", "token"}
)
"""Options of the island that the replay gives itself."""
LEASE_TIMEOUT_S = 5.0
"""Heartbeats come ten times as often: the timeline then has two points per second."""


@dataclass(frozen=True, slots=True)
class Server:
    """A vLLM server that is replayed against."""

    url: str
    core: int | None
    """Core that it is pinned to, when it was started here."""
    gate: Path | None = None
    """Folder of its gate; None when training yields to nothing."""

    @staticmethod
    def server_id(index: int) -> str:
        return f"server-{index}"

    @staticmethod
    def node(index: int) -> str:
        return f"node-{index}"


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """What to start beside the servers."""

    servers: tuple[Server, ...]
    island_cores: tuple[int | None, ...]
    """One island each; island k trains beside server k modulo the number of servers."""
    slo: str
    busy_requests: int
    scrape_interval_s: float
    min_h: int
    max_h: int
    seed: int
    train_options: tuple[tuple[str, str], ...]

    @property
    def num_ports(self) -> int:
        return 2 + len(self.servers) + len(self.island_cores)


def as_arguments(options: tuple[tuple[str, str], ...]) -> list[str]:
    """``(("batch_size", "4"),)`` → ``["--batch-size", "4"]``."""
    return [part for name, value in options for part in (f"--{name.replace('_', '-')}", value)]


def check_train_options(options: tuple[tuple[str, str], ...]) -> None:
    """Refuse options that an island would refuse, before anything is started.

    Raises:
        ConfigError: naming the option.
    """
    for name, _ in options:
        if name.replace("-", "_") in SET_BY_REPLAY:
            raise ConfigError(f"{name} is set by the replay itself", field="train_options", remedy="leave it out")
    try:
        load_settings(IslandSettings, ["--controller", "http://127.0.0.1:1", *as_arguments(options)])
    except ConfigError as exc:
        where = f"{exc.field}: " if exc.field else ""
        remedy = "see wadiloco island --help"
        raise ConfigError(f"{where}{exc.message}", field="train_options", remedy=remedy) from exc


class TrainingFleet:
    """The running processes of one run."""

    def __init__(self, spec: FleetSpec, *, children: Children, directory: Path, ports: list[int]) -> None:
        self._spec = spec
        self._children = children
        self._directory = directory
        free = iter(ports)
        self._controller_port, self._synchronizer_port = next(free), next(free)
        self._sidecar_ports = [next(free) for _ in spec.servers]
        self._island_ports = [next(free) for _ in spec.island_cores]

    @property
    def controller_url(self) -> str:
        return f"http://127.0.0.1:{self._controller_port}"

    def island_url(self, index: int) -> str:
        return f"http://127.0.0.1:{self._island_ports[index]}"

    @property
    def synchronizer_url(self) -> str:
        return f"http://127.0.0.1:{self._synchronizer_port}"

    async def start(self) -> None:
        """Start everything and wait until every island trains and every server's load is known."""
        self._start_synchronizer()
        self._start_controller()
        for url in (self.synchronizer_url, self.controller_url):
            alive = functools.partial(answers, f"{url}/healthz")
            await wait_for(url, alive, children=self._children, deadline_s=SERVICE_DEADLINE_S)
        for index in range(len(self._spec.servers)):
            self._start_sidecar(index)
        for index in range(len(self._spec.island_cores)):
            self._start_island(index)
        await wait_for("training", self._is_training, children=self._children, deadline_s=ISLAND_DEADLINE_S)

    def begin(self, policy: PolicySpec, budget: BudgetSpec) -> None:
        """Start a budget period now and put the policy in force (in this order: until then nothing syncs)."""
        self._put("/v1/budget", budget.model_dump_json())
        self._put("/v1/policy", policy.model_dump_json())

    def fleet(self) -> Fleet:
        return Fleet.model_validate(self._get("/v1/fleet"))

    def rounds(self) -> list[RoundRecord]:
        return RoundPage.model_validate(self._get("/v1/rounds")).rounds

    def start_again(self, name: str) -> Child:
        """Start ``controller``, ``synchronizer``, ``sidecar-K`` or ``island-K`` on the state that it left.

        Its former process must have ended; the caller takes it out of its `Children` first.
        """
        kind, _, index = name.partition("-")
        starters = {"sidecar": self._start_sidecar, "island": self._start_island}
        if kind in starters:
            return starters[kind](int(index))
        return {"controller": self._start_controller, "synchronizer": self._start_synchronizer}[kind]()

    def stop(self) -> None:
        """Stop islands first, so that they can take their leave."""
        mine = self._children.below(self._directory)
        self._children.stop([child for child in mine if child.name.startswith("island")])
        self._children.stop([child for child in mine if child in self._children.running])

    def _is_training(self) -> bool:
        try:
            fleet = self.fleet()
        except (httpx.HTTPError, UnavailableError):
            return False
        trains = [
            island
            for island in fleet.islands
            if island.alive and island.slot is not None and island.progress and island.progress.phase is Phase.INNER
        ]
        known = [server for server in fleet.servers if server.known]
        return len(trains) == len(self._spec.island_cores) and len(known) == len(self._spec.servers)

    def _start(self, name: str, command: str, *options: str, core: int | None = None) -> Child:
        argv = [*module_command("wadiloco"), command, "--host", "127.0.0.1", *options]
        environment = {**module_environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return self._children.start(name, argv, log=self._directory / f"{name}.log", env=environment, core=core)

    def _start_synchronizer(self) -> Child:
        return self._start(
            "synchronizer",
            "synchronizer",
            *("--port", str(self._synchronizer_port)),
            *("--directory", str(self._directory / "synchronizer")),
            *("--quorum", str(len(self._spec.island_cores))),
        )

    def _start_controller(self) -> Child:
        spec = self._spec
        return self._start(
            "controller",
            "controller",
            *("--port", str(self._controller_port), "--journal", str(self._directory / "journal.sqlite")),
            *("--num-slots", str(len(spec.island_cores)), "--policy", "no_sync", "--seed", str(spec.seed)),
            *("--min-h", str(spec.min_h), "--max-h", str(spec.max_h), "--tick-s", str(TICK_S)),
            *("--synchronizer-url", self.synchronizer_url, "--lease-timeout-s", str(LEASE_TIMEOUT_S)),
        )

    def _start_sidecar(self, index: int) -> Child:
        spec = self._spec
        return self._start(
            f"sidecar-{index}",
            "sidecar",
            *("--port", str(self._sidecar_ports[index]), "--vllm", spec.servers[index].url),
            *("--server-id", Server.server_id(index), "--node", Server.node(index)),
            *("--controller", self.controller_url, "--slo", spec.slo),
            *("--scrape-interval-s", str(spec.scrape_interval_s), "--busy-requests", str(spec.busy_requests)),
            *gate_option(spec.servers[index]),
        )

    def _start_island(self, index: int) -> Child:
        spec = self._spec
        server = index % len(spec.servers)
        core = spec.island_cores[index]
        return self._start(
            f"island-{index}",
            "island",
            *("--port", str(self._island_ports[index]), "--agent-id", f"island-{index}"),
            *("--slot", str(index), "--node", Server.node(server), "--server-id", Server.server_id(server)),
            *("--controller", self.controller_url, "--seed", str(spec.seed)),
            *(() if core is None else ("--cores", str(core))),
            *gate_option(spec.servers[server]),
            *as_arguments(spec.train_options),
        )

    def _get(self, path: str) -> Any:
        return self._request("GET", path).json()

    def _put(self, path: str, body: str) -> None:
        self._request("PUT", path, body)

    def _request(self, method: str, path: str, body: str | None = None) -> httpx.Response:
        response = httpx.request(
            method,
            f"{self.controller_url}{path}",
            content=body,
            headers={"Content-Type": "application/json"},
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
        )
        if response.is_error:
            raise UnavailableError(f"controller refused {method} {path}: {explain_response(response)}")
        return response


def gate_option(server: Server) -> tuple[str, ...]:
    return () if server.gate is None else ("--gate", str(server.gate))
