"""Islands that pull deltas from a real synchronizer: the bytes, the arithmetic, restarts, and what heals a mismatch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from diloco.codec import CODECS
from diloco.digest import sha256
from diloco.exchange import Exchange
from diloco.fragment import flatten_module, unflatten_into, wire_bytes
from diloco.incoming import Held
from diloco.island import Island
from diloco.protocol import SyncCommand
from diloco.schema import (
    CHUNK_BYTES,
    CODECS_HEADER,
    RESULT_HEADER,
    CodecName,
    FragmentState,
    Manifest,
    SyncOutcome,
    SyncReport,
    TensorSpec,
)
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.generation import path_of
from diloco.syncs import Pending
from diloco.transport import SynchronizerClient
from tests.diloco.conftest import served

SIZE = 201
LR, MU = 0.7, 0.9
LOSSY: tuple[CodecName, ...] = ("bf16", "int8", "int4")
SETTINGS: dict[str, Any] = {"outer_lr": LR, "outer_momentum": MU, "grace_max_s": 0.0}

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]
Vector = NDArray[np.float64]


def soon() -> float:
    return time.time() + 30


def noise(seed: int) -> Tensor:
    return 0.01 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Member:
    """An island that joined a run."""

    def __init__(self, client: SynchronizerClient, codec: CodecName = "fp32", *, slot: int = 0) -> None:
        module = nn.Linear(SIZE - 1, 1)
        unflatten_into(torch.linspace(-1, 1, SIZE), module)
        self.client = client
        self.island = Island(module, CODECS[codec])
        self.exchange = Exchange(self.island, client, slot=slot)
        self.exchange.join(deadline_s=soon())

    @property
    def local(self) -> Tensor:
        return flatten_module(self.island.module)

    def train(self, seed: int) -> None:
        unflatten_into(self.local - noise(seed), self.island.module)
        self.island.count_step(10)

    def begin(self, round_number: int | None = None) -> Pending:
        pending = self.exchange.begin(SyncCommand(round=round_number, epoch=0, deadline_s=soon()))
        assert isinstance(pending, Pending)
        return pending

    def finish(self, pending: Pending) -> SyncReport:
        return self.exchange.finish(pending, lambda: self.exchange.await_end(pending))

    def sync(self, round_number: int | None = None) -> SyncReport:
        report = self.exchange.run(SyncCommand(round=round_number, epoch=0, deadline_s=soon()))
        assert report is not None
        return report

    def state(self) -> FragmentState:
        return self.client.state(deadline_s=soon()).fragments[0]

    def holds_the_global_state(self) -> bool:
        state, digest = self.state(), sha256(wire_bytes(self.island.global_flat)).hex()
        return (self.island.version, digest) == (state.version, state.digest)


def exact_of(directory: Path, version: int) -> Tensor:
    tensors = load_file(path_of(directory, version))
    return torch.cat([tensors["exact.bias"].view(-1), tensors["exact.weight"].view(-1)])


def wide(tensor: Tensor) -> Vector:
    return tensor.numpy().astype(np.float64)


@pytest.mark.parametrize("pull_codec", CODECS)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_islands_hold_the_same_state_and_the_outer_step_applies_to_the_exact_one(
    serve: Serve, connect: Connect, tmp_path: Path, pull_codec: CodecName, codec: CodecName
) -> None:
    url = serve(tmp_path, quorum=2, pull_codec=pull_codec, **SETTINGS)
    members = [Member(connect(url), codec, slot=slot) for slot in range(2)]
    exact, momentum = wide(torch.linspace(-1, 1, SIZE)), np.zeros(SIZE)
    for number in range(4):
        progress = np.zeros(SIZE)
        for slot, member in enumerate(members):
            before = member.island.feedback.residual.clone() if member.island.feedback else torch.zeros(SIZE)
            member.train(10 * number + slot)
            # Against the published parameters, which are those that the island has.
            progress += wide(member.island.global_flat - member.local + before) / 2
        pending = [member.begin(number) for member in members]
        owed = [begun for member in members if (begun := member.island.accepted) is not None]
        progress -= sum((wide(c.encoded.left_out) / 2 for c in owed if c.encoded is not None), np.zeros(SIZE))
        reports = [member.finish(begun) for member, begun in zip(members, pending, strict=True)]
        assert {report.outcome for report in reports} == {SyncOutcome.APPLIED}
        assert {report.bytes_pulled for report in reports} == {CODECS[pull_codec].num_bytes(SIZE)}
        momentum = MU * momentum + progress
        exact -= LR * (progress + MU * momentum)
        assert all(member.holds_the_global_state() for member in members)
        assert torch.equal(members[0].local, members[1].local)
        if pull_codec != "fp32":
            np.testing.assert_allclose(wide(exact_of(tmp_path, number + 1)), exact, rtol=0, atol=2e-6)
    assert all(member.client.mismatches == 0 for member in members)


@pytest.mark.parametrize("pull_codec", LOSSY)
def test_what_a_delta_left_out_comes_with_the_next_ones(
    serve: Serve, connect: Connect, tmp_path: Path, pull_codec: CodecName
) -> None:
    settings = SETTINGS | {"outer_momentum": 0.0}
    member = Member(connect(serve(tmp_path, quorum=1, pull_codec=pull_codec, **settings)))
    member.train(1)
    member.sync()
    first = float((exact_of(tmp_path, 1) - member.island.global_flat).norm())
    assert 0 < first < 0.2 * float(noise(1).norm())
    for _ in range(6):  # nothing is trained any more: only the rest still travels
        assert member.sync().outcome is SyncOutcome.APPLIED
    assert float((exact_of(tmp_path, 7) - member.island.global_flat).norm()) < 0.01 * first + 1e-6


def closed_by_another(member: Member, other: Member, *, rounds: int) -> None:
    for _ in range(rounds):
        other.train(7)
        assert other.sync().outcome is SyncOutcome.APPLIED
    assert member.island.version == other.island.version - rounds


@pytest.mark.parametrize(
    ("behind", "expected_bytes"),
    [(1, CODECS["int4"].num_bytes(SIZE)), (2, 2 * CODECS["int4"].num_bytes(SIZE)), (3, 4 * SIZE)],
)
def test_an_island_that_is_behind_pulls_as_many_deltas_as_are_kept_or_the_whole(
    serve: Serve, connect: Connect, tmp_path: Path, behind: int, expected_bytes: int
) -> None:
    url = serve(tmp_path, quorum=1, pull_codec="int4", **SETTINGS)
    member, other = Member(connect(url)), Member(connect(url), slot=1)
    closed_by_another(member, other, rounds=behind)
    member.train(1)
    progress = member.local - member.island.global_flat
    assert member.client.bytes_pulled == 0
    pulled_before = other.client.bytes_pulled
    report = member.sync()
    assert (report.outcome, report.round) == (SyncOutcome.APPLIED, behind)
    # It caught up, contributed, and pulled the result.
    assert report.bytes_pulled == expected_bytes + CODECS["int4"].num_bytes(SIZE)
    assert member.holds_the_global_state()
    assert report.update_norm == pytest.approx(float(progress.norm()), rel=1e-3)
    newcomer = Member(connect(url), slot=2)
    assert newcomer.client.bytes_pulled == 4 * SIZE
    assert newcomer.holds_the_global_state()
    assert other.client.bytes_pulled == pulled_before


def test_deltas_that_take_more_bytes_than_the_whole_are_not_sent(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, pull_codec="bf16", **SETTINGS)
    member, other = Member(connect(url)), Member(connect(url), slot=1)
    closed_by_another(member, other, rounds=2)
    flat = torch.empty(SIZE)
    member.client.pull(2, flat, deadline_s=soon(), held=Held(version=0, parameters=member.island.global_flat))
    assert member.client.bytes_pulled == 4 * SIZE
    assert torch.equal(flat, other.island.global_flat)


def test_an_island_whose_state_is_another_finds_out_and_pulls_the_whole(
    serve: Serve, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, pull_codec="int4", **SETTINGS)))
    member.train(1)
    assert member.sync().state_mismatches == 0
    member.train(2)
    member.island.global_flat[3] += 1e-3  # as a flipped bit would
    with caplog.at_level(logging.ERROR):
        report = member.sync()
    assert (report.outcome, report.state_mismatches) == (SyncOutcome.APPLIED, 1)
    assert report.bytes_pulled == CODECS["int4"].num_bytes(SIZE) + 4 * SIZE
    assert "do not lead to the parameters" in caplog.text
    assert member.holds_the_global_state()
    member.train(3)
    assert member.sync().state_mismatches == 0


def test_deltas_come_whole_or_in_parts(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=1, pull_codec="int4", **SETTINGS)
    closed_by_another(Member(connect(url)), Member(connect(url), slot=1), rounds=2)
    with httpx.Client(base_url=url, trust_env=False) as http:
        query = {"version": 2, "base_version": 0}
        whole = http.get("/v1/fragments/0", params=query)
        size = 2 * CODECS["int4"].num_bytes(SIZE)
        cuts = [(0, 9), (10, size // 2 + 3), (size // 2 + 4, size - 1)]
        ranges = [{"Range": f"bytes={first}-{last}"} for first, last in cuts]
        parts = [http.get("/v1/fragments/0", params=query, headers=part).content for part in ranges]
    assert whole.headers[CODECS_HEADER] == "int4,int4"
    assert len(whole.content) == size
    assert b"".join(parts) == whole.content


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_late_contribution_is_taken_against_what_its_island_had(
    serve: Serve, connect: Connect, tmp_path: Path, codec: CodecName
) -> None:
    url = serve(tmp_path, quorum=1, pull_codec="int4", max_staleness=2, **(SETTINGS | {"outer_momentum": 0.0}))
    member, other = Member(connect(url), codec), Member(connect(url), slot=1)
    closed_by_another(member, other, rounds=2)
    member.train(1)
    report = member.sync(0)
    assert (report.outcome, report.staleness) == (SyncOutcome.STALE, 2)
    accepted = member.island.accepted
    assert accepted is not None
    merged = noise(1) - (accepted.encoded.left_out if accepted.encoded is not None else 0.0)
    before = exact_of(tmp_path, 2)
    other.train(3)
    assert other.sync().outcome is SyncOutcome.APPLIED
    expected = wide(before) - LR * (wide(noise(3)) + 3**-0.5 * wide(merged)) / 2
    np.testing.assert_allclose(wide(exact_of(tmp_path, 3)), expected, rtol=0, atol=2e-6)
    member.train(4)
    assert member.sync().outcome is SyncOutcome.APPLIED
    assert member.holds_the_global_state()


def run_with_restarts(connect: Connect, directory: Path, codecs: list[CodecName], *, num_runs: int) -> Tensor:
    """One round per codec, in so many processes' lives one after another; the exact parameters at the end."""
    member: Member | None = None
    for number, codec in enumerate(codecs):
        settings = SynchronizerSettings(port=0, directory=directory, quorum=1, pull_codec=codec, **SETTINGS)
        with served(settings) as url:
            client = connect(url)
            if member is None:
                member = Member(client, "int8")
            else:
                member.client, member.exchange._client = client, client
            for step in range(1 if num_runs > 1 else len(codecs)):
                member.train(number + step)
                assert member.sync().state_mismatches == 0
                assert member.holds_the_global_state()
        if num_runs == 1:
            break
    return exact_of(directory, len(codecs))


def test_a_restart_goes_on_from_the_exact_parameters(connect: Connect, tmp_path: Path) -> None:
    codecs: list[CodecName] = ["int4"] * 4
    once = run_with_restarts(connect, tmp_path / "once", codecs, num_runs=1)
    often = run_with_restarts(connect, tmp_path / "often", codecs, num_runs=4)
    assert torch.equal(once.view(torch.int32), often.view(torch.int32))


def test_a_run_may_go_on_with_another_codec(connect: Connect, tmp_path: Path) -> None:
    mixed: list[CodecName] = ["fp32", "int4", "fp32", "bf16", "int8"]
    exact = run_with_restarts(connect, tmp_path / "mixed", mixed, num_runs=5)
    # Momentum and feedback see other published parameters, so the runs are near each other, not the same.
    plain = run_with_restarts(connect, tmp_path / "plain", ["bf16"] * 5, num_runs=1)
    assert float((exact - plain).norm()) < 0.05 * float((plain - torch.linspace(-1, 1, SIZE)).norm())


def test_a_damaged_delta_is_a_damaged_generation(connect: Connect, tmp_path: Path) -> None:
    run_with_restarts(connect, tmp_path, ["int4"] * 2, num_runs=1)
    path = path_of(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x55
    path.write_bytes(data)
    with served(SynchronizerSettings(port=0, directory=tmp_path, pull_codec="int4", **SETTINGS)) as url:
        assert connect(url).state(deadline_s=soon()).fragments[0].version == 1
    assert [path.name for path in tmp_path.glob("*.corrupt")] == [path.name + ".corrupt"]


def test_deltas_of_several_chunks_arrive_in_order(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    size = CHUNK_BYTES // 2 + CHUNK_BYTES // 8 + 1
    client = connect(serve(tmp_path, quorum=1, pull_codec="bf16", **SETTINGS))
    start = torch.linspace(-1, 1, size)
    manifest = Manifest(tensors=(TensorSpec(name="weight", shape=(size,), dtype="float32"),))
    client.init(manifest, start, deadline_s=soon())
    client.push(0.9 * start, round=0, slot=0, epoch=0, tokens=1, deadline_s=soon())
    assert client.wait_version(0, deadline_s=soon()) == 1
    whole, moved = torch.empty(size), torch.empty(size)
    client.pull(1, moved, deadline_s=soon(), held=Held(version=0, parameters=start))
    assert client.bytes_pulled == 2 * size > CHUNK_BYTES
    client.pull(1, whole, deadline_s=soon())
    assert torch.equal(moved.view(torch.int32), whole.view(torch.int32))


def test_the_answer_says_what_it_is_and_the_metrics_what_it_lacks(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, pull_codec="int4", **SETTINGS)))
    assert member.client.state(deadline_s=soon()).pull_codec == "int4"
    member.train(1)
    member.sync()
    http = member.client._http
    delta = http.get("/v1/fragments/0", params={"version": 1, "base_version": 0})
    assert (delta.headers[CODECS_HEADER], len(delta.content)) == ("int4", CODECS["int4"].num_bytes(SIZE))
    assert "Repr-Digest" not in delta.headers
    for params in ({"version": 1}, {"version": 1, "base_version": 1}, {"version": 1, "base_version": 7}):
        whole = http.get("/v1/fragments/0", params=params)
        assert CODECS_HEADER not in whole.headers
        assert whole.headers["Repr-Digest"] == delta.headers[RESULT_HEADER]
        assert whole.content == bytes(wire_bytes(member.island.global_flat))
    name = 'wadiloco_synchronizer_pull_residual_norm{fragment="0"}'
    told = next(float(line.split()[1]) for line in http.get("/metrics").text.splitlines() if line.startswith(name))
    assert told == pytest.approx(float((exact_of(tmp_path, 1) - member.island.global_flat).norm()), rel=1e-4)


def test_with_fp32_generations_are_the_files_that_they_were(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, **SETTINGS)))
    member.train(1)
    member.sync()
    assert {name.partition(".")[0] for name in load_file(path_of(tmp_path, 1))} == {"parameters", "momentum"}
    assert path_of(tmp_path, 1).read_bytes().count(b"pull_codec") == 0
