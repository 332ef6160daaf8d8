"""The client against a real synchronizer: one contract, over HTTP on loopback."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from diloco.digest import sha256
from diloco.errors import FencedError, ManifestError, NotInitializedError, RoundClosedError
from diloco.fragment import wire_bytes
from diloco.schema import CHUNK_BYTES, Manifest, TensorSpec
from diloco.transport import SynchronizerClient
from service.errors import InputError, UnavailableError

SIZE = 64
LARGE = 3 * CHUNK_BYTES // 4 + 5
"""Elements of a model that takes three whole chunks and a rest."""

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


def soon() -> float:
    return time.time() + 20


def manifest(size: int = SIZE, *, name: str = "weight") -> Manifest:
    return Manifest(tensors=(TensorSpec(name=name, shape=(size,), dtype="float32"),))


def vector(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def started(client: SynchronizerClient, size: int = SIZE) -> Tensor:
    initial = vector(0, size)
    assert client.init(manifest(size), initial, deadline_s=soon()).accepted
    return initial


def push(client: SynchronizerClient, local: Tensor, *, round_number: int = 0, slot: int = 0, epoch: int = 1) -> bool:
    reply = client.push(local, round=round_number, slot=slot, epoch=epoch, tokens=100, deadline_s=soon())
    return reply.complete


@pytest.mark.parametrize("size", [1, SIZE, LARGE])
def test_a_round_goes_from_offer_to_pull(serve: Serve, connect: Connect, tmp_path: Path, size: int) -> None:
    client = connect(serve(tmp_path, outer_lr=1.0, outer_momentum=0.0))
    started(client, size)
    local = vector(1, size)
    assert push(client, local)
    assert client.wait_version(0, deadline_s=soon()) == 1
    pulled = torch.empty(size)
    assert client.pull(1, pulled, deadline_s=soon()) == 1
    assert torch.equal(pulled, local)
    fragment = client.state(deadline_s=soon()).fragments[0]
    assert (fragment.version, fragment.digest) == (1, sha256(wire_bytes(pulled)).hex())


@pytest.mark.parametrize("is_older", [False, True], ids=["new", "older"])
def test_a_byte_is_hashed_once_where_both_sides_know_how(
    serve: Serve, connect: Connect, tmp_path: Path, is_older: bool
) -> None:
    """An older synchronizer does not say what it wants, and one that reads an older island's requests gets no wish."""
    client = connect(serve(tmp_path, outer_lr=1.0, outer_momentum=0.0))
    started(client, LARGE)
    sent: list[bool] = []
    answered: list[bool] = []

    def note_request(request: httpx.Request) -> None:
        if request.method == "PUT":
            sent.append("Content-Digest" in request.headers)
        if is_older:
            request.headers.pop("Want-Content-Digest", None)

    def note_answer(response: httpx.Response) -> None:
        if response.status_code == 206:
            answered.append("Content-Digest" in response.headers)
        if is_older:
            response.headers.pop("Want-Content-Digest", None)

    client._http.event_hooks = {"request": [note_request], "response": [note_answer]}
    local, pulled = vector(1, LARGE), torch.empty(LARGE)
    assert push(client, local)
    assert client.wait_version(0, deadline_s=soon()) == 1
    client.pull(1, pulled, deadline_s=soon())
    assert torch.equal(pulled, local)
    assert sent == [True, is_older, is_older, is_older]
    assert answered == [is_older] * 4


@pytest.mark.parametrize("chunk", [0, 2])
def test_bytes_that_change_on_the_way_are_noticed(serve: Serve, connect: Connect, tmp_path: Path, chunk: int) -> None:
    client = connect(serve(tmp_path, outer_lr=1.0, outer_momentum=0.0))
    initial = started(client, LARGE)
    damaged = 0

    def damage(message: httpx.Request | httpx.Response) -> None:
        nonlocal damaged
        field = "Content-Range" if isinstance(message, httpx.Request) else "content-range"
        if message.headers.get(field, "").startswith(f"bytes {chunk * CHUNK_BYTES}-"):
            damaged += 1
            message.read()
            content = bytearray(message.content)
            content[-1] ^= 1
            if isinstance(message, httpx.Request):
                message.stream = httpx.ByteStream(bytes(content))
            else:
                message._content = bytes(content)

    client._http.event_hooks = {"request": [damage], "response": []}
    with pytest.raises(InputError, match="does not match the bytes that arrived"):
        push(client, vector(1, LARGE))
    assert client.state(deadline_s=soon()).fragments[0].open_round.slots == ()
    client._http.event_hooks = {"request": [], "response": [damage]}
    with pytest.raises(InputError, match="does not match the bytes that arrived"):
        client.pull(0, torch.empty(LARGE), deadline_s=soon())
    assert damaged == 2
    client._http.event_hooks = {"request": [], "response": []}
    pulled = torch.empty(LARGE)
    client.pull(0, pulled, deadline_s=soon())
    assert torch.equal(pulled, initial)


def test_the_first_offer_starts_the_run_and_the_others_learn_it(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path)
    clients = [connect(url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        offers = [
            pool.submit(client.init, manifest(LARGE), vector(seed, LARGE), deadline_s=soon())
            for seed, client in enumerate(clients)
        ]
        replies = [offer.result() for offer in offers]
    winners = [seed for seed, reply in enumerate(replies) if reply.accepted]
    assert len(winners) == 1
    pulled = torch.empty(LARGE)
    clients[0].pull(0, pulled, deadline_s=soon())
    assert torch.equal(pulled, vector(winners[0], LARGE))


def test_another_model_is_refused_with_the_first_difference(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path))
    started(client)
    with pytest.raises(
        ManifestError, match=r"parameter 0 is weight \[64\] float32 against weight \[65\] float32"
    ) as caught:
        client.init(manifest(SIZE + 1), vector(0, SIZE + 1), deadline_s=soon())
    assert caught.value.remedy is not None
    assert all(option in caught.value.remedy for option in ("--num-layers", "--width", "--directory"))


def test_contributions_before_the_first_offer_are_refused(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path))
    with pytest.raises(NotInitializedError):
        push(client, vector(1))
    with pytest.raises(NotInitializedError):
        client.pull(0, torch.empty(SIZE), deadline_s=soon())


@pytest.mark.parametrize("round_number", [0, 2])
def test_a_round_that_is_not_open_is_refused_with_the_version(
    serve: Serve, connect: Connect, tmp_path: Path, round_number: int
) -> None:
    client = connect(serve(tmp_path))
    started(client)
    push(client, vector(1))
    assert client.wait_version(0, deadline_s=soon()) == 1
    with pytest.raises(RoundClosedError) as refused:
        push(client, vector(2), round_number=round_number)
    assert refused.value.version == 1


def test_repeating_an_applied_contribution_is_not_late(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path))
    started(client)
    push(client, vector(1))
    assert client.wait_version(0, deadline_s=soon()) == 1
    assert push(client, vector(1))
    assert client.state(deadline_s=soon()).fragments[0].open_round.slots == ()


def test_an_older_epoch_of_a_slot_is_fenced(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path, quorum=2))
    started(client)
    push(client, vector(1), epoch=5)
    with pytest.raises(FencedError):
        push(client, vector(2), epoch=4)
    push(client, vector(3), epoch=4, slot=1)


def test_a_contribution_of_another_size_is_refused(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path))
    started(client)
    with pytest.raises(InputError, match="contribution has 260 bytes, the parameters have 256"):
        push(client, vector(1, SIZE + 1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_contribution_that_is_not_finite_is_refused(
    serve: Serve, connect: Connect, tmp_path: Path, bad: float
) -> None:
    client = connect(serve(tmp_path, quorum=2))
    started(client)
    local = vector(1)
    local[17] = bad
    with pytest.raises(InputError, match="element 17 is NaN or infinite"):
        push(client, local)
    assert client.state(deadline_s=soon()).fragments[0].open_round.slots == ()
    assert push(client, vector(1))


def test_every_wait_ends_at_its_deadline_without_a_synchronizer(connect: Connect) -> None:
    client = connect("http://127.0.0.1:1")
    began_s = time.monotonic()
    deadline_s = time.time() + 0.5
    assert client.wait_version(0, deadline_s=deadline_s) is None
    for operation in (
        lambda: client.state(deadline_s=deadline_s),
        lambda: client.pull(0, torch.empty(SIZE), deadline_s=deadline_s),
        lambda: client.push(vector(0), round=0, slot=0, epoch=0, tokens=1, deadline_s=deadline_s),
        lambda: client.init(manifest(), vector(0), deadline_s=deadline_s),
    ):
        with pytest.raises(UnavailableError, match="deadline passed"):
            operation()
    assert time.monotonic() - began_s < 5


def test_waiting_for_a_version_ends_at_its_deadline(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path))
    assert client.wait_version(-1, deadline_s=time.time() + 0.2) is None
    started(client)
    assert client.wait_version(-1, deadline_s=soon()) == 0
    assert client.wait_version(0, deadline_s=time.time() + 0.2) is None


def test_a_cancelled_client_stops_waiting(connect: Connect) -> None:
    client = connect("http://127.0.0.1:1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.state, deadline_s=time.time() + 60)
        client.cancel()
        with pytest.raises(UnavailableError, match="cancelled"):
            waiting.result(10)


def test_a_pull_of_a_version_that_is_gone_takes_the_newest(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path, outer_lr=1.0, outer_momentum=0.0))
    started(client)
    for number in range(3):
        push(client, vector(number + 1), round_number=number)
        assert client.wait_version(number, deadline_s=soon()) == number + 1
    pulled = torch.empty(SIZE)
    assert client.pull(2, pulled, deadline_s=soon()) == 2
    assert torch.equal(pulled, vector(2))
    assert client.pull(0, pulled, deadline_s=soon()) == 3
    assert torch.equal(pulled, vector(3))


def test_something_that_is_not_a_synchronizer_is_named(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path) + "/elsewhere")
    with pytest.raises(InputError, match="HTTP 404"):
        client.state(deadline_s=soon())
