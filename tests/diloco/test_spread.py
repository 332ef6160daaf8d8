"""Ranks that carry chunks of one transfer side by side, over real sockets, to and from a real synchronizer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from diloco.digest import ByteRange
from diloco.errors import RoundClosedError
from diloco.helpers import Helper, Helpers, help_at, receive_message, send_message
from diloco.schema import CHUNK_BYTES, ChunkReply, Manifest, TensorSpec
from diloco.spread import fetch_side_by_side, send_side_by_side
from diloco.transport import SynchronizerClient
from service.errors import InputError, UnavailableError
from tests.diloco.conftest import wait_until

NUM_CHUNKS = 9
SIZE = NUM_CHUNKS * CHUNK_BYTES // 4 - 5
MANIFEST = Manifest(tensors=(TensorSpec(name="a", shape=(SIZE,), dtype="float32"),))

Serve = Callable[..., str]
Spawn = Callable[..., Any]


def soon(wait_s: float = 30.0) -> float:
    return time.time() + wait_s


def vector(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Crew:
    """Rank 0 with helpers in threads, each with connections of its own."""

    def __init__(self, url: str, num_helpers: int, *, client: type[SynchronizerClient] = SynchronizerClient) -> None:
        self.url = url
        self.helpers = Helpers()
        self.asked: list[list[str]] = [[] for _ in range(num_helpers)]
        self._http: list[httpx.Client] = []
        self._threads = [
            threading.Thread(target=help_at, args=(self.helpers.address, self._counted(asked))) for asked in self.asked
        ]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.helpers.ready()) == num_helpers)
        self.client = client(self._open(), helpers=self.helpers)

    def _open(self) -> httpx.Client:
        self._http.append(httpx.Client(base_url=self.url, timeout=10, trust_env=False))
        return self._http[-1]

    def _counted(self, asked: list[str]) -> SynchronizerClient:
        class Counted(SynchronizerClient):
            def answer_to(self, method: str, path: str, **arguments: Any) -> httpx.Response:
                asked.append(method)
                return super().answer_to(method, path, **arguments)

        return Counted(self._open())

    def close(self) -> None:
        self.helpers.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for http in self._http:
            http.close()


@pytest.fixture
def crew() -> Iterator[Callable[..., Crew]]:
    made: list[Crew] = []

    def make(url: str, num_helpers: int, **options: Any) -> Crew:
        made.append(Crew(url, num_helpers, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def push(client: SynchronizerClient, flat: Tensor, *, slot: int = 0, version: int = 0, **how: Any) -> ChunkReply:
    return client.push(flat, round=version, slot=slot, epoch=0, tokens=5, **{"deadline_s": soon(), **how})


def outcome(client: SynchronizerClient) -> tuple[Tensor, str]:
    """What a round of two contributions makes, by this client, and its digest."""
    assert client.init(MANIFEST, vector(0), deadline_s=soon()).accepted
    for slot in range(2):
        assert push(client, vector(slot + 1), slot=slot).complete
    assert client.wait_version(0, deadline_s=soon()) == 1
    flat = torch.empty(SIZE)
    client.pull(1, flat, deadline_s=soon())
    return flat, client.state(deadline_s=soon()).fragments[0].digest


@pytest.mark.parametrize("num_helpers", [1, 3])
def test_several_ranks_make_what_one_makes_bit_for_bit(
    serve: Serve, crew: Callable[..., Crew], tmp_path: Path, num_helpers: int
) -> None:
    alone, digest = outcome(crew(serve(tmp_path / "alone", quorum=2), 0).client)
    several = crew(serve(tmp_path / "several", quorum=2), num_helpers)
    flat, same = outcome(several.client)
    assert torch.equal(flat.view(torch.int32), alone.view(torch.int32))
    assert same == digest
    for asked in several.asked:
        assert {"PUT", "GET"} <= set(asked), "each had its share"
    assert several.client.bytes_pulled == 4 * SIZE
    total = sum(asked.count("PUT") for asked in several.asked)
    assert total <= 2 * (NUM_CHUNKS - 1), "no chunk was sent twice"


def test_a_refusal_that_a_helper_meets_is_the_refusal(serve: Serve, crew: Callable[..., Crew], tmp_path: Path) -> None:
    several = crew(serve(tmp_path, quorum=1, grace_max_s=0.0), 2)
    several.client.init(MANIFEST, vector(0), deadline_s=soon())
    began = threading.Event()

    class Overtaken(SynchronizerClient):
        """Another island closes the round once the upload is under way."""

        def _ask(self, helper: Helper | None, method: str, *arguments: Any, **keywords: Any) -> httpx.Response:
            if helper is not None and method == "PUT" and not began.is_set():
                began.set()
                push(SynchronizerClient(self._http), vector(2), slot=1)
                assert SynchronizerClient(self._http).wait_version(0, deadline_s=soon()) == 1
            return super()._ask(helper, method, *arguments, **keywords)

    with pytest.raises(RoundClosedError) as refused:
        push(Overtaken(several.client._http, helpers=several.helpers), vector(1))
    assert began.is_set()
    assert refused.value.version == 1
    assert len(several.helpers.ready()) == 2, "they are asked again"


def test_a_synchronizer_that_is_killed_in_the_middle_gets_the_whole_again(
    spawn: Spawn, crew: Callable[..., Crew], tmp_path: Path
) -> None:
    process = spawn(tmp_path, "--quorum", "1")
    several = crew(process.url, 2)
    several.client.init(MANIFEST, vector(0), deadline_s=soon(60))
    lock, sent = threading.Lock(), []

    class Killed(SynchronizerClient):
        def _ask(self, helper: Helper | None, method: str, *arguments: Any, **keywords: Any) -> httpx.Response:
            with lock:
                sent.append(method)
                if sent.count("PUT") == 5:
                    process.kill()
                    process.start()
            return super()._ask(helper, method, *arguments, **keywords)

    client = Killed(several.client._http, helpers=several.helpers)
    assert push(client, vector(1), deadline_s=soon(90)).complete
    assert client.wait_version(0, deadline_s=soon()) == 1
    assert sent.count("PUT") > NUM_CHUNKS


def test_a_rank_that_dies_fails_the_transfer_at_once_and_the_next_goes_without_it(
    serve: Serve, crew: Callable[..., Crew], tmp_path: Path
) -> None:
    several = crew(serve(tmp_path, quorum=1), 1)
    several.client.init(MANIFEST, vector(0), deadline_s=soon())

    def die() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(several.helpers.address)
            receive_message(connection)

    thread = threading.Thread(target=die)
    thread.start()
    wait_until(lambda: len(several.helpers.ready()) == 2)
    began_s = time.monotonic()
    with pytest.raises(UnavailableError, match="ranks: a rank that carries chunks does not answer: it hung up"):
        push(several.client, vector(1), deadline_s=soon(300))
    assert time.monotonic() - began_s < 100, "not at the deadline"
    thread.join()
    assert len(several.helpers.ready()) == 1
    assert push(several.client, vector(1)).complete


def test_a_rank_that_hangs_fails_the_transfer_at_the_deadline(
    serve: Serve, crew: Callable[..., Crew], tmp_path: Path
) -> None:
    several = crew(serve(tmp_path, quorum=1), 0)
    several.client.init(MANIFEST, vector(0), deadline_s=soon())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(several.helpers.address)
        wait_until(lambda: len(several.helpers.ready()) == 1)
        with pytest.raises(UnavailableError, match="a rank that carries chunks does not answer: timed out"):
            push(several.client, vector(1), deadline_s=soon(4.0))
    assert several.helpers.ready() == []


def test_what_a_helper_cannot_reach_is_what_the_transfer_fails_with(
    serve: Serve, crew: Callable[..., Crew], tmp_path: Path
) -> None:
    several = crew(serve(tmp_path, quorum=1), 0)
    several.client.init(MANIFEST, vector(0), deadline_s=soon())
    astray = SynchronizerClient(httpx.Client(base_url="http://127.0.0.1:9", timeout=1, trust_env=False))
    thread = threading.Thread(target=help_at, args=(several.helpers.address, astray))
    thread.start()
    wait_until(lambda: len(several.helpers.ready()) == 1)
    with pytest.raises(UnavailableError, match=r"http://127.0.0.1:9: deadline passed: ConnectError"):
        push(several.client, vector(1), deadline_s=soon(4.0))
    assert len(several.helpers.ready()) == 1
    several.helpers.close()
    thread.join(10)
    astray.close()


def test_a_small_transfer_asks_nobody(serve: Serve, crew: Callable[..., Crew], tmp_path: Path) -> None:
    several = crew(serve(tmp_path, quorum=1), 1)
    small = Manifest(tensors=(TensorSpec(name="a", shape=(100,), dtype="float32"),))
    several.client.init(small, torch.zeros(100), deadline_s=soon())
    assert push(several.client, torch.ones(100)).complete
    assert several.asked == [[]]


def reply(received: int, *ahead: int, complete: bool = False) -> ChunkReply:
    return ChunkReply(received_bytes=received, ahead=ahead, complete=complete, version=0)


def test_every_chunk_is_sent_once_and_the_answer_that_tells_of_the_most_counts() -> None:
    sent: list[ByteRange] = []

    def send(part: ByteRange) -> ChunkReply:
        sent.append(part)
        return reply(part.stop, part.start)

    total = 5 * CHUNK_BYTES + 7
    best = send_side_by_side([send, send], start=CHUNK_BYTES, total=total)
    assert best == reply(total, 5 * CHUNK_BYTES)
    assert sorted(part.start for part in sent) == [CHUNK_BYTES * index for index in range(1, 6)]
    assert max(part.stop for part in sent) == total


def test_it_ends_when_a_chunk_does_not_stay() -> None:
    sent: list[int] = []

    def send(part: ByteRange) -> ChunkReply:
        sent.append(part.start)
        return reply(0)

    assert send_side_by_side([send], start=CHUNK_BYTES, total=50 * CHUNK_BYTES) == reply(0)
    assert sent == [CHUNK_BYTES]


def test_the_first_error_ends_it_and_is_raised_when_all_are_done() -> None:
    other_began, may_end, ended = threading.Event(), threading.Event(), []

    def fails(_: int) -> None:
        assert other_began.wait(30)
        may_end.set()
        raise InputError("no", field="x")

    def slow(first: int) -> None:
        other_began.set()
        assert may_end.wait(30)
        ended.append(first)

    with pytest.raises(InputError, match="no"):
        fetch_side_by_side([fails, slow], range(1000))
    assert len(ended) == 1 or len(ended) < 1000
    assert ended, "it was waited for"


def test_messages_arrive_as_they_were_sent() -> None:
    here, there = socket.socketpair()
    body = bytes(range(256)) * 5000
    thread = threading.Thread(target=send_message, args=(here, {"a": [1, "ü"]}, body))
    thread.start()
    assert receive_message(there) == ({"a": [1, "ü"]}, body)
    thread.join()
    here.close()
    with pytest.raises(OSError, match="hung up"):
        receive_message(there)
    there.close()
