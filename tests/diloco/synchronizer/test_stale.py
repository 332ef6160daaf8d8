"""Stale contributions over HTTP: taken in with less weight, fenced, known again, and still there after a kill -9."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from diloco.digest import format_digest, sha256
from diloco.errors import FencedError, RoundClosedError
from diloco.fragment import wire_bytes
from diloco.schema import ChunkReply, Manifest, RoundState, TensorSpec
from diloco.transport import SynchronizerClient

SIZE = 64
MANIFEST = Manifest(tensors=(TensorSpec(name="weight", shape=(SIZE,), dtype="float32"),))
PLAIN_AVERAGE = {"outer_lr": 1.0, "outer_momentum": 0.0}

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]
Start = Callable[..., "Peer"]


def soon() -> float:
    return time.time() + 20


def vector(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Peer:
    """A synchronizer of a run, as islands see it."""

    def __init__(self, url: str, client: SynchronizerClient) -> None:
        self.url = url
        self.client = client
        client.init(MANIFEST, vector(0), deadline_s=soon())

    def push(self, local: Tensor, *, round_number: int, slot: int, **said: Any) -> ChunkReply:
        fields = {"epoch": 1, "tokens": 10} | said
        return self.client.push(local, round=round_number, slot=slot, deadline_s=soon(), **fields)

    def close_round(self, number: int, *, slot: int = 0) -> Tensor:
        """One island makes the next version, by itself."""
        self.push(vector(1000 + number), round_number=number, slot=slot)
        assert self.client.wait_version(number, deadline_s=soon()) == number + 1
        return self.pulled(number + 1)

    def pulled(self, version: int) -> Tensor:
        flat = torch.empty(SIZE)
        assert self.client.pull(version, flat, deadline_s=soon()) == version
        return flat

    def open_round(self) -> RoundState:
        return self.client.state(deadline_s=soon()).fragments[0].open_round

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text
        return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.rpartition(" ")[0] == name)


@pytest.fixture
def start(serve: Serve, connect: Connect, tmp_path: Path) -> Iterator[Start]:
    def begin(**settings: Any) -> Peer:
        url = serve(tmp_path, **{"grace_max_s": 0.0, "max_staleness": 2, **PLAIN_AVERAGE, **settings})
        return Peer(url, connect(url))

    yield begin  # noqa: PT022  (serve and connect close what it began)


def test_a_late_contribution_rides_along_with_its_weight_and_opens_no_round(start: Start) -> None:
    peer = start()
    peer.close_round(0)
    stale = vector(7)
    reply = peer.push(stale, round_number=0, slot=1, tokens=30)
    assert (reply.complete, reply.version, reply.round, reply.staleness) == (True, 1, 1, 1)
    assert reply.staleness_weight == pytest.approx(2**-0.5)
    state = peer.open_round()
    assert (state.slots, state.opened_s, state.closes_at_s) == ((1,), None, None)
    (told,) = state.contributions
    assert (told.round, told.tokens, told.staleness) == (0, 30, 1)
    assert told.staleness_weight == reply.staleness_weight
    assert peer.client.wait_version(1, deadline_s=time.time() + 0.3) is None
    g = peer.pulled(1)
    fresh = vector(8)
    peer.push(fresh, round_number=1, slot=0, tokens=10)
    assert peer.client.wait_version(1, deadline_s=soon()) == 2
    delta = (10 * (g - fresh) + 30 * 2**-0.5 * (vector(0) - stale)) / 40
    np.testing.assert_allclose(peer.pulled(2).numpy(), (g - delta).numpy(), rtol=1e-5, atol=1e-5)
    assert peer.metric('wadiloco_synchronizer_contributions_total{outcome="stale"}') == 1
    assert peer.metric("wadiloco_synchronizer_staleness_versions_sum") == 1


def test_what_is_too_stale_is_late_and_from_the_future_early(start: Start) -> None:
    peer = start()
    for number in range(3):
        peer.close_round(number)
    with pytest.raises(RoundClosedError) as late:
        peer.push(vector(7), round_number=0, slot=1)
    assert late.value.version == 3
    assert peer.push(vector(7), round_number=1, slot=1).staleness == 2
    for future in (4, 1 << 60):
        with pytest.raises(RoundClosedError, match="has not opened"):
            peer.push(vector(7), round_number=future, slot=1)
    assert peer.metric('wadiloco_synchronizer_contributions_total{outcome="late"}') == 1
    assert peer.metric('wadiloco_synchronizer_contributions_total{outcome="early"}') == 2


def test_by_default_nothing_is_taken_in_late(start: Start) -> None:
    peer = start(max_staleness=0)
    peer.close_round(0)
    with pytest.raises(RoundClosedError):
        peer.push(vector(7), round_number=0, slot=1)
    assert peer.open_round().slots == ()


def test_a_stale_contribution_of_a_fenced_epoch_is_refused(start: Start) -> None:
    peer = start()
    peer.close_round(0)
    peer.push(vector(7), round_number=0, slot=1, epoch=5)
    with pytest.raises(FencedError):
        peer.push(vector(8), round_number=0, slot=1, epoch=4)
    peer.close_round(1)
    with pytest.raises(FencedError):
        peer.push(vector(8), round_number=1, slot=1, epoch=4)


def test_a_repeated_one_counts_once_also_after_its_round_has_closed(start: Start) -> None:
    peer = start()
    peer.close_round(0)
    first = peer.push(vector(7), round_number=0, slot=1)
    again = peer.push(vector(7), round_number=0, slot=1)
    assert (again.round, again.staleness) == (first.round, first.staleness) == (1, 1)
    peer.close_round(1)
    known = peer.push(vector(7), round_number=0, slot=1)
    assert (known.version, known.round, known.staleness) == (2, 1, 1)
    assert peer.open_round().slots == ()
    # One that was in time is known two versions later, too: taken for stale it would count twice.
    own = peer.push(vector(1000), round_number=0, slot=0)
    assert (own.version, own.round, own.staleness) == (2, 0, 0)
    assert peer.open_round().slots == ()
    assert peer.metric('wadiloco_synchronizer_contributions_total{outcome="repeated"}') == 3


def test_progress_that_holds_what_was_merged_is_not_merged_again(start: Start) -> None:
    peer = start()
    peer.close_round(0, slot=1)
    peer.close_round(1, slot=0)
    with pytest.raises(RoundClosedError):
        peer.push(vector(7), round_number=0, slot=1)
    assert peer.metric('wadiloco_synchronizer_contributions_total{outcome="merged"}') == 1
    assert peer.push(vector(7), round_number=1, slot=1).staleness == 1


def test_newer_progress_takes_the_place_of_a_stale_one(start: Start) -> None:
    peer = start()
    g = peer.close_round(0)
    peer.push(vector(7), round_number=0, slot=1)
    assert peer.push(vector(8), round_number=1, slot=1).staleness == 0
    assert peer.client.wait_version(1, deadline_s=soon()) == 2
    assert not torch.equal(g, peer.pulled(2))
    assert torch.equal(peer.pulled(2), vector(8))


def test_a_copy_of_an_older_contribution_does_not_take_the_place_of_a_newer_one(start: Start) -> None:
    """As of a request that was given up on and stood in a queue while its sender went on."""
    peer = start(quorum=2)
    peer.push(vector(7), round_number=0, slot=1, tokens=10)
    newer = peer.push(vector(8), round_number=0, slot=1, tokens=20)
    with pytest.raises(RoundClosedError):
        peer.push(vector(7), round_number=0, slot=1, tokens=10)
    peer.push(vector(9), round_number=0, slot=0)
    assert peer.client.wait_version(0, deadline_s=soon()) == 1
    (applied,) = peer.client.fetch(1, torch.empty(SIZE), deadline_s=soon(), slot=1).applied or ()
    assert applied.digest == newer.digest == sha256(wire_bytes(vector(8))).hex()


def test_an_upload_whose_round_closes_meanwhile_goes_on_as_a_stale_one(start: Start) -> None:
    peer = start()

    class Slow(SynchronizerClient):
        """Another island closes the round before our last chunk."""

        def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
            if method != "PUT" or peer.open_round().round != 0:
                return super()._request(method, path, **arguments)
            super()._request(method, path, **part_of(arguments, 0, 100))
            peer.close_round(0)
            return super()._request(method, path, **part_of(arguments, 100, 4 * SIZE))

    slow = Slow(httpx.Client(base_url=peer.url, timeout=10, trust_env=False))
    reply = slow.push(vector(7), round=0, slot=1, epoch=1, tokens=10, deadline_s=soon())
    slow.close()
    assert (reply.complete, reply.round, reply.staleness) == (True, 1, 1)


def part_of(arguments: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """A request for a whole upload, cut down to some of its bytes."""
    data = arguments["content"][start:stop]
    headers = {
        **arguments["headers"],
        "Content-Range": f"bytes {start}-{stop - 1}/{len(arguments['content'])}",
        "Content-Digest": format_digest(sha256(data)),
    }
    return {**arguments, "content": data, "headers": headers}


@pytest.mark.parametrize(
    "said",
    [
        {"tokens": -1},
        {"tokens": 0},
        {"tokens": 10**13},
        {"expected": 0},
        {"expected": 5000},
        {"closes_in_s": -1},
        {"closes_in_s": "nan"},
        {"closes_in_s": 1e9},
        {"epoch": -1},
    ],
)
def test_absurd_claims_are_refused_counted_and_change_nothing(start: Start, said: dict[str, Any]) -> None:
    peer = start(quorum=2)
    before = peer.open_round()
    params = {"epoch": 1, "tokens": 10} | said
    answer = httpx.put(
        f"{peer.url}/v1/rounds/0/fragments/0/contributions/1",
        params=params,
        content=b"x",
        timeout=10,
        trust_env=False,
    )
    assert answer.status_code == 422
    assert answer.json()["field"] == f"query.{next(iter(said))}"
    assert peer.open_round() == before
    assert peer.metric('wadiloco_synchronizer_contributions_total{outcome="invalid"}') == 1


@pytest.mark.integration
def test_a_kill_9_in_mid_round_loses_no_stale_contribution_and_changes_no_result(
    spawn: Callable[..., Any], connect: Connect, tmp_path: Path
) -> None:
    options = ("--quorum", "2", "--max-staleness", "2", "--grace-max-s", "0")
    results = []
    for name in ("undisturbed", "killed"):
        process = spawn(tmp_path / name, *options)
        peer = Peer(process.url, connect(process.url))
        for slot in (0, 1):
            peer.push(vector(10 + slot), round_number=0, slot=slot)
        assert peer.client.wait_version(0, deadline_s=soon()) == 1
        peer.push(vector(20), round_number=0, slot=2, tokens=70)
        peer.push(vector(21), round_number=1, slot=0)
        before = peer.open_round()
        if name == "killed":
            process.kill()
            process.start()
            after = peer.open_round()
            assert (after.slots, after.contributions) == (before.slots, before.contributions) != ((), ())
            assert peer.push(vector(20), round_number=0, slot=2, tokens=70).round == 1
        peer.push(vector(22), round_number=1, slot=1)
        assert peer.client.wait_version(1, deadline_s=soon()) == 2
        if name == "killed":
            process.kill()
            process.start()
            # What is in a generation is known after a restart, too.
            assert peer.push(vector(20), round_number=0, slot=2, tokens=70).version == 2
            assert peer.open_round().slots == ()
        results.append(peer.pulled(2))
    assert torch.equal(*results)
