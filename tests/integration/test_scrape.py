"""The scrape source against a real vLLM server: every signal has a series, and requests are counted as they come."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from sidecar.app import create_app
from sidecar.config import SidecarSettings
from sidecar.schema import EngineState
from tests.sidecar.helpers import running, until

pytestmark = [pytest.mark.vllm, pytest.mark.integration]
NUM_REQUESTS = 4


def test_every_signal_of_this_vllm_is_matched_and_arrivals_are_counted(vllm_url: str) -> None:
    async def main() -> None:
        app = create_app(SidecarSettings(vllm=vllm_url, node="host", scrape_interval_s=0.2))
        sidecar = app.state.sidecar
        async with running(app), httpx.AsyncClient(base_url=vllm_url, timeout=60.0) as client:
            await until(lambda: sidecar.observer.status.state is EngineState.READY, "a READY server")
            snapshot, result = sidecar.observer.snapshot, sidecar.scrape
            assert [signal for signal, series in snapshot.signals.items() if series is None] == []
            assert snapshot.missing == ()
            assert snapshot.kv_capacity_tokens > 0
            assert (result.accepts, snapshot.asleep) == (True, False)
            begun_s = snapshot.monotonic_s
            body = {"model": "tiny", "prompt": "one two three", "max_tokens": 8, "ignore_eos": True}
            answers = [await client.post("/v1/completions", json=body) for _ in range(NUM_REQUESTS)]
            assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS

            def arrivals() -> float:
                return sum(sample.arrivals or 0.0 for sample in sidecar.observer.window(since_monotonic_s=begun_s))

            await until(lambda: arrivals() >= NUM_REQUESTS, "the arrivals")
            assert arrivals() == NUM_REQUESTS

    asyncio.run(main())
