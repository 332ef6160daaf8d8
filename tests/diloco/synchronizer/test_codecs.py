"""Encoded contributions over HTTP: mixed in a round, in any order, over a restart, and refused where they are wrong."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.codec import CODECS, codec_named
from diloco.digest import ByteRange, format_content_range, format_digest, sha256
from diloco.fragment import wire_bytes
from diloco.outer import Contribution, OuterOptimizer
from diloco.schema import CHUNK_BYTES, CodecName, Manifest, RoundState, TensorSpec
from diloco.synchronizer.config import SynchronizerSettings
from diloco.transport import SynchronizerClient
from service.errors import InputError
from tests.diloco.conftest import served

SIZE = 1000
CODEC_OF: dict[int, CodecName] = {0: "int4", 1: "fp32", 2: "int8", 3: "bf16"}
TOKENS = {0: 100, 1: 300, 2: 7, 3: 50}

Serve = Callable[..., str]
Spawn = Callable[..., Any]
Connect = Callable[[str], SynchronizerClient]


def soon() -> float:
    return time.time() + 60


def vector(seed: int, *, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def payload(slot: int, *, size: int = SIZE) -> Tensor:
    """What the island of that slot pushes against version 0: progress of its own, in its codec."""
    codec = CODECS[CODEC_OF[slot]]
    progress = 0.01 * vector(slot + 1, size=size)
    return codec.encode(vector(0, size=size) - progress if codec.carries_parameters else progress)


def expected(slots: tuple[int, ...], *, size: int = SIZE) -> bytes:
    """The parameters after a round of these slots."""
    start = vector(0, size=size)
    contributions = {}
    for slot in slots:
        codec = CODECS[CODEC_OF[slot]]
        decoded = codec.decode(payload(slot, size=size), size)
        local = decoded if codec.carries_parameters else start - decoded
        contributions[slot] = Contribution(local=local, tokens=TOKENS[slot])
    outer = OuterOptimizer(start, torch.zeros(size), lr=0.7, mu=0.9)
    return bytes(wire_bytes(outer.propose(contributions).parameters))


class Peer:
    """A synchronizer of a run, as islands see it."""

    def __init__(self, client: SynchronizerClient, *, size: int = SIZE) -> None:
        self.client = client
        self.size = size
        manifest = Manifest(tensors=(TensorSpec(name="weight", shape=(size,), dtype="float32"),))
        client.init(manifest, vector(0, size=size), deadline_s=soon())

    def push(self, slot: int, **changed: Any) -> None:
        said = {"payload": payload(slot, size=self.size), "codec": CODEC_OF[slot], "round": 0} | changed
        bytes_ = said.pop("payload")
        reply = self.client.push(bytes_, slot=slot, epoch=1, tokens=TOKENS[slot], deadline_s=soon(), **said)
        assert reply.complete

    def open_round(self) -> RoundState:
        return self.client.state(deadline_s=soon()).fragments[0].open_round

    def pulled(self, version: int) -> bytes:
        assert self.client.wait_version(version - 1, deadline_s=soon()) == version
        flat = torch.empty(self.size)
        assert self.client.pull(version, flat, deadline_s=soon()) == version
        return bytes(wire_bytes(flat))


def test_the_step_of_a_mixed_round_is_the_same_in_every_order_of_arrival(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    for order in itertools.permutations((0, 1, 2)):
        peer = Peer(connect(serve(tmp_path / "".join(map(str, order)), quorum=3)))
        for slot in order:
            peer.push(slot)
        assert peer.pulled(1) == expected((0, 1, 2))


def test_a_restart_in_mid_round_keeps_encoded_contributions(connect: Connect, tmp_path: Path) -> None:
    settings = SynchronizerSettings(port=0, directory=tmp_path, quorum=4)
    for slot in (2, 0, 3):
        with served(settings) as url:
            peer = Peer(connect(url))
            peer.push(slot)
            before = peer.open_round()
        with served(settings) as url:
            after = Peer(connect(url)).open_round()
            assert after.contributions == before.contributions
    assert {entry.slot: entry.codec for entry in after.contributions} == {0: "int4", 2: "int8", 3: "bf16"}
    with served(settings) as url:
        peer = Peer(connect(url))
        peer.push(1)
        assert peer.pulled(1) == expected((0, 1, 2, 3))


@pytest.mark.integration
def test_kill_9_in_mid_round_changes_no_result(spawn: Spawn, connect: Connect, tmp_path: Path) -> None:
    size = 2 * CHUNK_BYTES + 10  # more than one chunk as int4
    process = spawn(tmp_path, "--quorum", "2")
    peer = Peer(connect(process.url), size=size)
    peer.push(0)
    process.kill()
    process.start()
    assert peer.open_round().slots == (0,)
    peer.push(1)
    assert peer.pulled(1) == expected((0, 1), size=size)


def test_a_repeated_encoded_contribution_counts_once_also_after_its_round(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    peer = Peer(connect(serve(tmp_path, quorum=2, grace_max_s=0.0)))
    for _ in range(2):
        peer.push(0)
    assert peer.open_round().slots == (0,)
    peer.push(1)
    first = peer.pulled(1)
    peer.push(0)
    assert peer.open_round().slots == ()
    assert peer.pulled(1) == first


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_stale_encoded_contribution_has_its_weight(
    serve: Serve, connect: Connect, tmp_path: Path, staleness: int
) -> None:
    settings: dict[str, Any] = {"max_staleness": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "grace_max_s": 0.0}
    peer = Peer(connect(serve(tmp_path, quorum=1, **settings)))
    for number in range(staleness):
        peer.push(1, payload=CODECS["fp32"].encode(vector(50 + number)), round=number)
        current = torch.frombuffer(bytearray(peer.pulled(number + 1)), dtype=torch.float32)
    peer.push(0)
    fresh = vector(99)
    peer.push(1, payload=CODECS["fp32"].encode(fresh), round=staleness)
    late = CODECS["int4"].decode(payload(0), SIZE)
    delta = (TOKENS[1] * (current - fresh) + TOKENS[0] * (1 + staleness) ** -0.5 * late) / (TOKENS[0] + TOKENS[1])
    result = torch.frombuffer(bytearray(peer.pulled(staleness + 1)), dtype=torch.float32)
    torch.testing.assert_close(result, current - delta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"codec": "int3"}, "codec: 'int3' is none of fp32, bf16, int8, int4"),
        ({"codec": "INT4"}, "codec: 'INT4' is none of"),
        ({"codec": "fp32"}, "Content-Range: contribution has 532 bytes, the parameters have 4000"),
        ({"codec": "int8"}, "Content-Range: contribution has 532 bytes, the parameters have 1032 as int8"),
        ({"payload": torch.zeros(533, dtype=torch.uint8)}, "has 533 bytes, the parameters have 532 as int4"),
        ({"payload": torch.full((532,), 0xFF, dtype=torch.uint8)}, "body: element 0 is NaN or infinite"),
        ({"payload": CODECS["int4"].encode(torch.full((SIZE,), 1e20))}, "away from the global parameters"),
    ],
)
def test_a_wrong_encoded_contribution_is_refused_by_its_field_and_changes_nothing(
    serve: Serve, connect: Connect, tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    peer = Peer(connect(serve(tmp_path, quorum=2)))
    peer.push(1)
    before = peer.open_round()
    with pytest.raises(InputError, match=message):
        peer.push(0, **said)
    assert peer.open_round() == before
    peer.push(0)
    assert peer.pulled(1) == expected((0, 1))


@pytest.mark.parametrize(
    ("codec", "field", "remedy"),
    [
        ("int3", "codec", "--codec"),
        ("x" * 33, "query.codec", "/docs"),
        ("int8", "Content-Range", "the same model"),
    ],
)
def test_the_first_chunk_of_a_wrong_upload_is_answered_with_field_and_remedy(
    serve: Serve, connect: Connect, tmp_path: Path, codec: str, field: str, remedy: str
) -> None:
    peer = Peer(connect(serve(tmp_path)))
    data = bytes(wire_bytes(payload(0)))
    answer = peer.client._http.put(
        "/v1/rounds/0/fragments/0/contributions/0",
        params={"epoch": 1, "tokens": 1, "codec": codec},
        headers={
            "Content-Range": format_content_range(ByteRange(0, 100, len(data))),
            "Content-Digest": format_digest(sha256(data[:100])),
            "Repr-Digest": format_digest(sha256(data)),
        },
        content=data[:100],
    )
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert remedy in answer.json()["remedy"]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("slot", CODEC_OF)
def test_a_damaged_file_of_a_contribution_is_removed_at_the_start(connect: Connect, tmp_path: Path, slot: int) -> None:
    settings = SynchronizerSettings(port=0, directory=tmp_path, quorum=2)
    with served(settings) as url:
        Peer(connect(url)).push(slot)
    (path,) = tmp_path.glob("contribution-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x11
    path.write_bytes(data)
    with served(settings) as url:
        assert Peer(connect(url)).open_round().slots == ()
    assert not path.exists()


def test_bytes_are_counted_as_encoded(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    peer = Peer(connect(serve(tmp_path, quorum=2)))
    text = "wadiloco_synchronizer_bytes_total"

    def received() -> float:
        lines = peer.client._http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f'{text}{{direction="in"}} '))

    before = received()
    peer.push(0)
    assert received() - before == codec_named("int4").num_bytes(SIZE) == 532
