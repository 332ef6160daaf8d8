"""How an agent looks for a controller that is away."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry

from controller.schema import AgentLease, Autonomy
from diloco.agent.config import IslandSettings
from diloco.agent.link import RETRY_LONGEST_S, ControllerLink
from diloco.agent.metrics import IslandMetrics
from diloco.agent.state import AgentState
from service.peers import Peers

ATTEMPTS = 12


class Hurried(ControllerLink):
    """Notes its pauses, makes none, and ends after `ATTEMPTS`."""

    def __init__(self, state: AgentState, http: httpx.AsyncClient, url: str) -> None:
        metrics = IslandMetrics(CollectorRegistry(), state)
        super().__init__(state, http, metrics, peers=Peers([url]), on_directive=lambda _: None, on_pause=lambda _: None)
        self.pauses: list[float] = []

    async def _pause(self, pause_s: float, exit_event: asyncio.Event) -> None:
        self.pauses.append(pause_s)
        if len(self.pauses) == ATTEMPTS:
            exit_event.set()


def lease(lease_timeout_s: float) -> AgentLease:
    return AgentLease(
        agent_id="a",
        slot=0,
        epoch=1,
        run_id="r",
        min_h=8,
        max_h=32,
        heartbeat_interval_s=lease_timeout_s / 10,
        lease_timeout_s=lease_timeout_s,
        synchronizer_url=None,
        directive_seq=0,
        autonomy=Autonomy(),
    )


@pytest.mark.parametrize(
    ("lease_timeout_s", "longest_s"), [(5.0, 5.0 / 3), (1.5, 0.5), (600.0, RETRY_LONGEST_S), (None, RETRY_LONGEST_S)]
)
def test_a_controller_that_comes_back_is_found_well_within_a_lease(
    lease_timeout_s: float | None, longest_s: float
) -> None:
    async def main() -> list[float]:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}"
            state = AgentState(IslandSettings(controller=url, agent_id="a"))
            if lease_timeout_s is not None:
                state.take_lease(lease(lease_timeout_s))
            async with httpx.AsyncClient(trust_env=False) as http:
                link = Hurried(state, http, url)
                await link.keep_lease(asyncio.Event())
                return link.pauses

    pauses = asyncio.run(main())
    assert pauses == sorted(pauses)
    assert max(pauses) == pytest.approx(longest_s)
