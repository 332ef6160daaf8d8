"""Fragments whose syncs run beside inner steps, and whose global parameters come as deltas."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import torch

from diloco.boundary import StepBoundary
from diloco.digest import sha256
from diloco.fragment import wire_bytes
from diloco.schema import SyncOutcome, SyncReport
from diloco.transport import SynchronizerClient
from tests.diloco.conftest import wait_until
from tests.diloco.test_streaming import NUM_FRAGMENTS, PLAIN_AVERAGE, Member, contribute

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


def sync_beside_a_step(member: Member, round_number: int | None) -> SyncReport | None:
    """One sync on a thread of its own, with an inner step between the copy and all else."""
    boundary = StepBoundary(Event())
    command = member.order(round_number).model_copy(update={"overlap": True})
    captured = member.exchange.capture(command)
    with ThreadPoolExecutor(1) as transfers:
        end = transfers.submit(lambda: member.exchange.run(command, captured=captured, at_boundary=boundary))
        member.train(0.5)
        while not end.done():
            wait_until(lambda: boundary.is_waiting or end.done())
            boundary.serve()
        return end.result()


def test_fragments_sync_in_turn_beside_inner_steps(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    client = connect(serve(tmp_path, quorum=1, pull_codec="int4", **PLAIN_AVERAGE))
    member = Member(client)
    for number in range(2 * NUM_FRAGMENTS):
        member.train(0.25)
        report = sync_beside_a_step(member, number)
        assert report is not None
        assert (report.outcome, report.round, report.state_mismatches) == (SyncOutcome.APPLIED, number, 0)
        fragment = member.island.fragments[number % NUM_FRAGMENTS]
        assert fragment.steps_since_sync == 1  # the one that was taken meanwhile
    state = client.state(deadline_s=member.order(None).deadline_s)
    for told, fragment in zip(state.fragments, member.island.fragments, strict=True):
        assert (told.version, told.digest) == (2, sha256(wire_bytes(fragment.global_flat)).hex())


def test_a_copy_of_a_fragment_whose_turn_is_over_is_not_contributed(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    client = connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE))
    member = Member(client)
    contribute(connect(str(client._http.base_url)), 9.0, fragment=0, version=0, slot=1)
    assert client.wait_version(0, deadline_s=member.order(None).deadline_s) == 1
    member.train(0.25)
    report = sync_beside_a_step(member, None)
    assert report is not None
    assert (report.outcome, report.round, report.inner_steps) == (SyncOutcome.APPLIED, 1, 2)
    assert member.versions == [1, 1, 0]
    torch.testing.assert_close(member.island.fragments[0].global_flat, torch.full((4,), 9.0))
