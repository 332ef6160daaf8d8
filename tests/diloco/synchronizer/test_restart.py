"""The synchronizer dies and comes back: what it accepted is still there, and clients in mid-operation go on."""

from __future__ import annotations

import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from diloco.schema import CHUNK_BYTES, Manifest, RoundState, TensorSpec
from diloco.transport import SynchronizerClient
from service.errors import UnavailableError

SIZE = CHUNK_BYTES // 2
"""Elements of a model of two chunks."""
MANIFEST = Manifest(tensors=(TensorSpec(name="weight", shape=(SIZE,), dtype="float32"),))
DEADLINE_S = 60.0

Spawn = Callable[..., Any]
Connect = Callable[[str], SynchronizerClient]

pytestmark = pytest.mark.integration


def soon() -> float:
    return time.time() + DEADLINE_S


def vector(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def push(client: SynchronizerClient, slot: int, *, round_number: int = 0) -> None:
    reply = client.push(
        vector(10 * round_number + slot + 1), round=round_number, slot=slot, epoch=1, tokens=7, deadline_s=soon()
    )
    assert reply.complete


def push_in_vain(client: SynchronizerClient) -> str:
    """Why an upload cannot be taken; asked again where the machine stood still from the start to the deadline."""
    while True:
        with pytest.raises(UnavailableError) as caught:
            client.push(vector(1), round=0, slot=0, epoch=1, tokens=7, deadline_s=time.time() + 1)
        if "no time was left to ask" not in str(caught.value):
            return str(caught.value)


def pulled(client: SynchronizerClient, version: int) -> Tensor:
    flat = torch.empty(SIZE)
    assert client.pull(version, flat, deadline_s=soon()) == version
    return flat


def open_round(client: SynchronizerClient) -> RoundState:
    return client.state(deadline_s=soon()).fragments[0].open_round


def undisturbed(spawn: Spawn, connect: Connect, directory: Path, num_rounds: int) -> Tensor:
    client = connect(spawn(directory, "--quorum", "2").url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    for number in range(num_rounds):
        for slot in (1, 0):
            push(client, slot, round_number=number)
        assert client.wait_version(number, deadline_s=soon()) == number + 1
    return pulled(client, num_rounds)


def test_kill_9_in_mid_round_keeps_accepted_contributions_and_changes_no_result(
    spawn: Spawn, connect: Connect, tmp_path: Path
) -> None:
    expected = undisturbed(spawn, connect, tmp_path / "undisturbed", 2)
    process = spawn(tmp_path / "killed", "--quorum", "2")
    client = connect(process.url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    for number in range(2):
        push(client, 0, round_number=number)
        before = open_round(client)
        process.kill()
        process.start()
        after = open_round(client)
        assert (after.round, after.slots) == (number, (0,))
        assert before.opened_s is not None
        assert after.opened_s == pytest.approx(before.opened_s, abs=1.0)
        push(client, 1, round_number=number)
        assert client.wait_version(number, deadline_s=soon()) == number + 1
    assert torch.equal(pulled(client, 2), expected)


def test_clients_in_mid_operation_survive_a_restart(spawn: Spawn, connect: Connect, tmp_path: Path) -> None:
    process = spawn(tmp_path, "--quorum", "2")
    first, second = connect(process.url), connect(process.url)
    first.init(MANIFEST, vector(0), deadline_s=soon())
    push(first, 0)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first.wait_version, 0, deadline_s=soon())
        process.kill()
        pushing = pool.submit(push, second, 1)
        process.start()
        pushing.result(DEADLINE_S)
        assert waiting.result(DEADLINE_S) == 1


def test_a_clean_stop_releases_long_polls_at_once(spawn: Spawn, connect: Connect, tmp_path: Path) -> None:
    process = spawn(tmp_path)
    client = connect(process.url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_version, 0, deadline_s=time.time() + 20)
        began_s = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - began_s < 4
        client.cancel()
        assert waiting.result(10) is None


@contextmanager
def requests(process: Any, head: str, num_requests: int) -> Iterator[list[socket.socket]]:
    """That many connections on which this was sent, and nothing after it."""
    url = httpx.URL(process.url)
    with ExitStack() as stack:
        address = (url.host, url.port)
        connections = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(num_requests)]
        for connection in connections:
            connection.sendall(head.encode())
        yield connections


UPLOAD = (
    "PUT /v1/rounds/0/fragments/0/contributions/0?epoch=1&tokens=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nabc"
)
DOWNLOAD = "GET /v1/fragments/0 HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(("head", "stops_within_s"), [(UPLOAD, 10.0), (DOWNLOAD, 20.0)], ids=["upload", "download"])
def test_a_stop_ends_requests_that_would_never_end_without_a_word_for_each(
    spawn: Spawn, connect: Connect, tmp_path: Path, head: str, stops_within_s: float
) -> None:
    process = spawn(tmp_path)
    client = connect(process.url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    with requests(process, head, 50) as connections:
        # A request that came after those has its answer, so those are under way.
        client.state(deadline_s=soon())
        began_s = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - began_s < stops_within_s
        assert head == DOWNLOAD or {connection.recv(12) for connection in connections} == {b"HTTP/1.1 503"}
    assert len(process.lines) < 20
    assert process.find(re.compile("Traceback")) is None


def test_clients_that_go_away_in_mid_upload_are_not_worth_a_word(
    spawn: Spawn, connect: Connect, tmp_path: Path
) -> None:
    process = spawn(tmp_path)
    client = connect(process.url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    with requests(process, UPLOAD, 20):
        client.state(deadline_s=soon())
    push(client, 0)
    assert process.stop() == 0
    assert process.find(re.compile("Traceback")) is None


def test_readiness_follows_the_disk(spawn: Spawn, connect: Connect, tmp_path: Path) -> None:
    process = spawn(tmp_path, "--quorum", "2")
    client = connect(process.url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    assert httpx.get(f"{process.url}/readyz", trust_env=False).status_code == 200
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    assert "cannot write" in push_in_vain(client)
    answer = httpx.get(f"{process.url}/readyz", trust_env=False)
    assert (answer.status_code, "File too large" in answer.json()["reason"]) == (503, True)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    push(client, 0)
    assert httpx.get(f"{process.url}/readyz", trust_env=False).status_code == 200


def test_a_full_disk_keeps_the_round_open_until_there_is_room(spawn: Spawn, connect: Connect, tmp_path: Path) -> None:
    process = spawn(tmp_path)
    client = connect(process.url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    # Room for a contribution (the parameters once), not for a generation (parameters and momentum).
    limit_bytes = 6 * SIZE
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    push(client, 0)
    assert client.wait_version(0, deadline_s=time.time() + 1) is None
    assert open_round(client).slots == (0,)
    assert process.find(re.compile(r"outer step failed, the round stays open .*File too large"))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert client.wait_version(0, deadline_s=soon()) == 1


def test_an_upload_goes_on_when_the_disk_has_room_again(spawn: Spawn, connect: Connect, tmp_path: Path) -> None:
    process = spawn(tmp_path)
    client = connect(process.url)
    client.init(MANIFEST, vector(0), deadline_s=soon())
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (3 * SIZE, resource.RLIM_INFINITY))
    reason = push_in_vain(client)
    assert re.search(r"deadline passed: HTTP 503: directory: cannot write .*File too large", reason), reason
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    push(client, 0)
    assert client.wait_version(0, deadline_s=soon()) == 1


def test_a_second_synchronizer_on_the_same_directory_is_refused(spawn: Spawn, tmp_path: Path) -> None:
    spawn(tmp_path)
    with pytest.raises(AssertionError, match="belongs to a running synchronizer"):
        spawn(tmp_path)
