"""A real controller process, and a fleet of sidecars and agents that talk to it over HTTP as real ones do."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from controller.schema import Heartbeat
from diloco.schema import Progress, SyncReport
from replay.processes import Child, Children, free_ports
from service.child import module_command, module_environment
from tests.controller.helpers import progress, registration, report
from tests.ports import share_of

DEADLINE_S = 30.0
BEAT_S = 0.25
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><b>bold</b>"


@dataclass
class LiveController:
    """One address, at which a controller can be killed and started again."""

    children: Children
    folder: Path
    port: int
    options: tuple[str, ...] = ()
    token: str | None = None
    _child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        base = ["controller", "--port", str(self.port), "--journal", str(self.folder / "journal.sqlite")]
        environment = module_environment()
        if self.token is not None:
            environment["WADILOCO_CONTROLLER_TOKEN"] = self.token
        command = [*module_command("wadiloco"), *base, *self.options]
        self._child = self.children.start("controller", command, log=self.folder / "controller.log", env=environment)
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._answers():
            self.children.check()
            assert time.monotonic() < deadline_s, self._child.log_tail()
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._child is not None
        self._child.process.kill()
        self.children.stop([self._child])

    def terminate(self) -> str:
        """Ask it to end, wait until it has, and return its log."""
        assert self._child is not None
        self._child.process.terminate()
        assert self._child.process.wait(DEADLINE_S) == 0
        return self._child.log.read_text()

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=10, trust_env=False)

    def _answers(self) -> bool:
        with self.client() as http, suppress(httpx.TransportError):
            return http.get("/healthz").status_code == 200
        return False


@contextmanager
def live_controller(folder: Path, *options: str, token: str | None = None) -> Iterator[LiveController]:
    children = Children()
    controller = LiveController(children, folder, free_ports(1, share_of(range(18900, 19000)))[0], options, token)
    try:
        controller.start()
        yield controller
    finally:
        children.stop()


def forecast(load: float) -> list[dict[str, float]]:
    """As a sidecar's: the further ahead, the wider."""
    points = []
    for horizon_s in (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0):
        spread = 0.4 + horizon_s / 60
        points.append(
            {
                "horizon_s": horizon_s,
                "arrivals_per_s": load,
                "arrivals_per_s_q10": load * max(0.0, 1 - spread),
                "arrivals_per_s_q50": load * 0.9,
                "arrivals_per_s_q90": load * (1 + spread),
                "running": 2 * load,
                "running_q90": 2 * load * (1 + spread),
                "burst_probability": min(1.0, horizon_s / 100),
                "burst_arrivals": 40.0,
            }
        )
    return points


def live_sample(server_id: str, t_s: float, *, number: int = 0, **fields: Any) -> dict[str, Any]:
    """What the sidecar of a server under a wave of load says."""
    wave = 0.5 + 0.45 * math.sin(t_s / 17 + number)
    running, requests = round(12 * wave), round(6 * wave) + 1
    return {
        "server_id": server_id,
        "node": f"host-{number // 2}",
        "t_s": t_s,
        "interval_s": BEAT_S,
        "state": "ready",
        "running": running,
        "waiting": round(2 * wave),
        "kv_usage_frac": wave * 0.8,
        "arrivals": requests,
        "slo_requests": requests,
        "slo_violations": requests // 6,
        "slo_violations_upper": requests // 6,
        "slo_target_frac": 0.99,
        "pressure_frac": wave,
        "trainer_phase": "inner" if wave < 0.7 else "none",
        "pace": 1 - wave,
        "gate_busy": wave > 0.7,
        "gate_reason": "in_flight" if wave > 0.7 else "pressure",
        "sync_cost_per_s": wave * 0.3,
        "sync_costs_ahead": [{"start_s": s, "violations": wave * (1 - s / 100)} for s in (0.0, 5.0, 30.0, 60.0)],
        "forecast": forecast(8 * wave),
        **fields,
    }


@dataclass
class Island:
    """One agent: registers, beats, obeys a sync by reporting it applied."""

    agent_id: str
    epoch: int = 0
    step: int = 2000
    h: int = 0
    round: int = 0
    seq: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    reports: list[SyncReport] = field(default_factory=list)

    def progress(self) -> Progress:
        loss = 2.0 + 3.0 * math.exp(-self.step / 4000)
        told = {"loss": loss, "loss_at_sync": loss + 0.02, "yielded_s": self.step / 900, "last_sync_at_s": None}
        return progress(self.h, step=self.step, round=self.round, **{**told, **self.extra})


class LiveFleet:
    """Sidecars and islands that beat four times a second, in a thread of their own, until the block ends."""

    def __init__(self, controller: LiveController, servers: list[str], islands: list[Island]) -> None:
        self.controller = controller
        self.servers = servers
        self.islands = islands
        self.overrides: dict[str, dict[str, Any]] = {}
        """Fields of a server's samples from now on."""
        self.silent: set[str] = set()
        """Servers and islands that say nothing."""
        self.failure: BaseException | None = None
        self._exit = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LiveFleet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.set()
        self._thread.join(DEADLINE_S)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        with self.controller.client() as http:
            while not self._exit.wait(BEAT_S):
                try:
                    self._beat(http)
                except httpx.TransportError:
                    continue  # The controller is being restarted.
                except BaseException as exc:  # noqa: BLE001 - told when the block ends
                    self.failure = exc
                    return

    def _beat(self, http: httpx.Client) -> None:
        now_s = time.time()
        samples = [
            live_sample(name, now_s, number=number, **self.overrides.get(name, {}))
            for number, name in enumerate(self.servers)
            if name not in self.silent
        ]
        http.post("/v1/samples", json={"samples": samples}).raise_for_status()
        for number, island in enumerate(self.islands):
            if island.agent_id not in self.silent:
                self._beat_island(http, island, node=f"host-{number // 2}", server_id=self.servers[number])

    def _beat_island(self, http: httpx.Client, island: Island, *, node: str, server_id: str) -> None:
        if not island.epoch:
            body = registration(island.agent_id, "first", node=node, server_id=server_id).model_dump(mode="json")
            lease = http.post("/v1/agents", json=body).raise_for_status().json()
            island.epoch, island.seq = lease["epoch"], lease["directive_seq"]
        island.step += 1
        island.h += 1
        beat = Heartbeat(
            instance="first", epoch=island.epoch, t_s=time.time(), progress=island.progress(), syncs=island.reports
        )
        path = f"/v1/agents/{island.agent_id}"
        answer = http.post(f"{path}/heartbeat", json=beat.model_dump(mode="json"))
        if answer.status_code == 409:
            island.epoch = 0  # Another lease is needed.
            return
        island.reports = island.reports[answer.raise_for_status().json()["syncs_acknowledged"] :]
        query: dict[str, str | int] = {"instance": "first", "after": island.seq, "wait_s": 0}
        told = http.get(f"{path}/directives", params=query).raise_for_status().json()
        island.seq = told["seq"]
        for directive in told["directives"]:
            if directive["kind"] == "sync" and directive["round"] == island.round:
                self._sync(island)

    def _sync(self, island: Island) -> None:
        now_s = time.time()
        island.reports.append(
            report(
                island.round,
                started_s=now_s - 1.4,
                pushed_s=now_s - 0.6,
                finished_s=now_s,
                bytes_pushed=12_000_000,
                bytes_pulled=48_000_000,
                inner_steps=island.h,
            )
        )
        island.round, island.h = island.round + 1, 0
