"""A clock that stands still, messages with good defaults, the application in process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from controller.app import build_controller_app
from controller.clock import Clock
from controller.config import ControllerSettings
from controller.core import Controller
from controller.headroom import CostSource
from controller.loop import Loop
from controller.schema import AgentLease, AgentRegistration, Heartbeat, HeartbeatReply
from diloco.schema import Progress, SyncOutcome, SyncReport

START_S = 1_700_000_000.0
EPOCH_0 = int(START_S)
"""Epochs of a fresh journal count from its time."""
DEADLINE_S = 10.0


class ManualClock:
    """Moves only when told."""

    def __init__(self, now_s: float = START_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class MemoryStore:
    """Keeps what would go to the journal."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], BaseModel | str] = {}

    def put(self, table: str, key: str | int, value: BaseModel | str) -> None:
        self.rows[table, str(key)] = value

    def forget(self, table: str, key: str | int) -> None:
        self.rows.pop((table, str(key)), None)


def registration(agent_id: str = "island-0", instance: str = "first", **fields: Any) -> AgentRegistration:
    return AgentRegistration.model_validate({"agent_id": agent_id, "instance": instance, "node": "host-a", **fields})


def progress(h: int = 0, *, step: int = 1000, **fields: Any) -> Progress:
    base = {"step": step, "inner_steps_since_sync": h, "tokens": step * 10, "tokens_since_sync": h * 10, "loss": 2.0}
    return Progress.model_validate({**base, "step_time_s": 0.1, "phase": "inner", **fields})


def report(round_: int = 0, outcome: SyncOutcome = SyncOutcome.APPLIED, **fields: Any) -> SyncReport:
    base = {
        "round": round_,
        "outcome": outcome,
        "started_s": START_S,
        "pushed_s": START_S + 1,
        "finished_s": START_S + 2,
        "bytes_pushed": 100,
        "bytes_pulled": 100,
        "inner_steps": 10,
        "tokens": 100,
    }
    return SyncReport.model_validate({**base, **fields})


def sample(server_id: str = "vllm-0", t_s: float = START_S, **fields: Any) -> dict[str, Any]:
    return {"server_id": server_id, "node": "host-a", "t_s": t_s, "state": "ready", "pressure_frac": 0.2, **fields}


def make_settings(journal: Path, **values: Any) -> ControllerSettings:
    fast: dict[str, Any] = {"port": 0, "num_slots": 1, "policy": "fixed_h", "min_h": 2, "max_h": 100, "tick_s": 0.02}
    fast["policy_params"] = {"h": 10} if "policy" not in values else {}
    return ControllerSettings(journal=journal / "journal.sqlite", **{**fast, **values})


class Client:
    """One agent's, sidecar's and operator's view of a controller in this process."""

    def __init__(self, http: httpx.AsyncClient, app: FastAPI) -> None:
        self.http = http
        self.app = app
        self.controller: Controller = app.state.controller
        self.loop: Loop = app.state.loop

    async def register(self, agent_id: str = "island-0", instance: str = "first", **fields: Any) -> AgentLease:
        body = registration(agent_id, instance, **fields)
        answer = await self.http.post("/v1/agents", json=body.model_dump(mode="json"))
        assert answer.status_code == 200, answer.text
        return AgentLease.model_validate(answer.json())

    async def beat(
        self, agent_id: str = "island-0", instance: str = "first", *, epoch: int, **fields: Any
    ) -> HeartbeatReply:
        answer = await self.try_beat(agent_id, instance, epoch=epoch, **fields)
        assert answer.status_code == 200, answer.text
        return HeartbeatReply.model_validate(answer.json())

    async def try_beat(
        self, agent_id: str = "island-0", instance: str = "first", *, epoch: int, **fields: Any
    ) -> httpx.Response:
        """Epochs count from `EPOCH_0` here: 1 is the first."""
        beat = Heartbeat(instance=instance, epoch=EPOCH_0 + epoch, t_s=START_S, **fields)
        return await self.http.post(f"/v1/agents/{agent_id}/heartbeat", json=beat.model_dump(mode="json"))

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def directives(self, agent_id: str = "island-0", instance: str = "first", **query: Any) -> Any:
        return await self.get(f"/v1/agents/{agent_id}/directives", instance=instance, **query)

    async def metric(self, name: str) -> float | None:
        """Value of the series whose name and labels are exactly these; None when it is absent."""
        text = (await self.http.get("/metrics")).text
        found = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == name]
        return float(found[0]) if found else None


@asynccontextmanager
async def running(settings: ControllerSettings, clock: Clock, costs: CostSource | None = None) -> AsyncIterator[Client]:
    async with running_app(build_controller_app(settings, clock=clock, costs=costs)) as client:
        yield client


@asynccontextmanager
async def running_app(app: FastAPI) -> AsyncIterator[Client]:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://controller") as http:
            yield Client(http, app)


def play(
    settings: ControllerSettings,
    clock: Clock,
    body: Callable[[Client], Awaitable[None]],
    costs: CostSource | None = None,
) -> None:
    """Run ``body`` against a controller in this process."""

    async def main() -> None:
        async with running(settings, clock, costs) as client:
            await body(client)

    asyncio.run(main())


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for ``condition()`` with a deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        await asyncio.sleep(0.005)
