"""The load generator's latencies against those of an independent client: blocking sockets, a thread per request.

Both send in the same run: each request of one schedule goes to one of the two at random, so that whatever the machine
does meets both alike. Prints the ratios with 95 % bootstrap intervals; the point estimates must agree within 10 %.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest

from replay.loadgen import PlannedRequest, run_load
from replay.priority import ahead_of_others

pytestmark = [pytest.mark.bench, pytest.mark.vllm, pytest.mark.timeout(600)]

ROUNDS, PER_ROUND, RATE_PER_S, MAX_TOKENS = 4, 200, 5.0, 16
LEAD_S = 2.0
RESAMPLES = 1000


class Latency(NamedTuple):
    ttft_s: float
    e2e_s: float


def schedule(seed: int, count: int) -> list[PlannedRequest]:
    rng = random.Random(seed)
    arrival_s, planned = 0.0, []
    for _ in range(count):
        arrival_s += rng.expovariate(RATE_PER_S)
        prompt = tuple(rng.choices(range(3, 251), k=rng.randint(10, 120)))
        planned.append(PlannedRequest(arrival_s, 0, prompt, MAX_TOKENS))
    return planned


def ask(url: str, request: PlannedRequest, start_s: float) -> Latency:
    """One request over a connection of its own, timed from before the connect."""
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    threading.Event().wait(max(0.0, start_s + request.arrival_s - time.monotonic()))
    sent_s = time.monotonic()
    first_s = last_s = None
    seen, received = 0, b""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        while data := connection.recv(65536):
            now_s = time.monotonic()
            received += data
            count = received.count(b'"choices":[{')
            if count > seen:
                first_s, last_s, seen = first_s or now_s, now_s, count
    assert first_s is not None, received
    assert last_s is not None
    return Latency(first_s - sent_s, last_s - sent_s)


def ask_all(url: str, requests: Sequence[PlannedRequest], start_s: float) -> list[Latency]:
    answers: dict[int, Latency] = {}

    def run(index: int) -> None:
        with ahead_of_others():
            answers[index] = ask(url, requests[index], start_s)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(len(requests))]


def test_latencies_agree_with_an_independent_client(vllm_url: str) -> None:
    ask_all(vllm_url, schedule(999, 30), time.monotonic())
    ours: list[Latency] = []
    theirs: list[Latency] = []
    rng = random.Random(0)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for number in range(ROUNDS):
            planned = schedule(number, PER_ROUND)
            mine = [rng.random() < 0.5 for _ in planned]
            start_s = time.monotonic() + LEAD_S
            independent = pool.submit(
                ask_all, vllm_url, [r for r, own in zip(planned, mine, strict=True) if not own], start_s
            )
            own_requests = [r for r, own in zip(planned, mine, strict=True) if own]
            results = asyncio.run(
                run_load(own_requests, [vllm_url], model="tiny", timeout_s=60.0, start_at_monotonic_s=start_s)
            )
            theirs += independent.result()
            for result in results:
                assert result.ttft_s is not None
                assert result.e2e_s is not None
                ours.append(Latency(result.ttft_s, result.e2e_s))
    report(np.array(ours), np.array(theirs))


def report(ours: np.ndarray, theirs: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    print(f"\n{len(ours)} requests by the load generator, {len(theirs)} by the independent client")
    ratios = {}
    for column, name in enumerate(Latency._fields):
        for percent in (50, 95):
            mine, other = (np.percentile(side[:, column], percent) for side in (ours, theirs))
            resampled = [
                np.percentile(rng.choice(ours[:, column], len(ours)), percent)
                / np.percentile(rng.choice(theirs[:, column], len(theirs)), percent)
                for _ in range(RESAMPLES)
            ]
            low, high = np.percentile(resampled, [2.5, 97.5])
            ratios[name, percent] = mine / other
            print(
                f"{name} p{percent}: {mine * 1e3:.1f} ms against {other * 1e3:.1f} ms,"
                f" ratio {mine / other:.3f} (95 % interval {low:.3f} to {high:.3f})"
            )
    assert 0.9 <= ratios["e2e_s", 50] <= 1.1
    assert 0.9 <= ratios["ttft_s", 50] <= 1.1
