"""What an island gave is in the global parameters once: whatever is lost, left out, restored or begun anew."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.codec import CODECS
from diloco.exchange import LEFT_OUT, Exchange
from diloco.fragment import flatten_module, unflatten_into
from diloco.island import Island
from diloco.protocol import SyncCommand
from diloco.schema import CodecName, SyncOutcome, SyncReport
from diloco.synchronizer.config import SynchronizerSettings
from diloco.syncs import Pending
from diloco.transport import SynchronizerClient
from service.errors import InputError, UnavailableError
from tests.diloco.conftest import served, wait_until

SIZE = 6
PLAIN_AVERAGE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "grace_max_s": 0.0}

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]
Lossy = Callable[[str], "LossyClient"]


def soon() -> float:
    return time.time() + 20


def start() -> Tensor:
    return torch.arange(SIZE, dtype=torch.float32)


class LossyClient(SynchronizerClient):
    """Pushes arrive; the answers to the next ``lose`` of them do not."""

    lose = 0

    def push(self, *arguments: Any, **keywords: Any) -> Any:
        reply = super().push(*arguments, **keywords)
        if self.lose:
            self.lose -= 1
            raise UnavailableError("the answer was lost")
        return reply


def lossy_client(url: str) -> LossyClient:
    return LossyClient(httpx.Client(base_url=url, timeout=10, trust_env=False))


@pytest.fixture
def lossy() -> Iterator[Lossy]:
    with ExitStack() as stack:

        def start(url: str) -> LossyClient:
            client = lossy_client(url)
            stack.callback(client.close)
            return client

        yield start


class Member:
    """An island of six parameters."""

    def __init__(self, client: SynchronizerClient, *, slot: int = 0, codec: CodecName = "fp32") -> None:
        module = nn.Linear(SIZE - 1, 1)
        unflatten_into(start(), module)
        self.island = Island(module, CODECS[codec])
        self.slot = slot
        self.exchange = Exchange(self.island, client, slot=slot)
        self.exchange.join(deadline_s=soon())

    def move_to(self, client: SynchronizerClient) -> None:
        """Speak to another synchronizer from now on, with nothing forgotten."""
        offered = self.exchange.offered
        self.exchange = Exchange(self.island, client, slot=self.slot)
        self.exchange.offered = offered

    def train(self, change: float | Tensor, *, tokens: int = 10) -> None:
        unflatten_into(self.local + change, self.island.module)
        self.island.count_step(tokens)

    def sync(self, round_number: int | None = None, *, wait_s: float = 20.0) -> SyncReport:
        report = self.exchange.run(SyncCommand(round=round_number, epoch=0, deadline_s=time.time() + wait_s))
        assert report is not None
        return report

    @property
    def local(self) -> Tensor:
        return flatten_module(self.island.module)


def contribute(client: SynchronizerClient, flat: Tensor, *, round_number: int, slot: int = 1) -> None:
    """What another island would do to close a round alone."""
    client.push(flat, round=round_number, slot=slot, epoch=0, tokens=10, deadline_s=soon())
    assert client.wait_version(round_number, deadline_s=soon()) == round_number + 1


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_round_that_closed_without_the_contribution_settles_nothing(
    serve: Serve, connect: Connect, tmp_path: Path, codec: CodecName
) -> None:
    """As when the state comes back from a copy that was taken before the contribution."""
    member = Member(connect(serve(tmp_path / "lost", quorum=2, **PLAIN_AVERAGE)), codec=codec)
    shutil.copytree(tmp_path / "lost", tmp_path / "copy")
    member.train(0.01 * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 100.0]))
    before = member.local.clone()
    assert member.sync(0, wait_s=0.3).outcome is SyncOutcome.FAILED
    assert member.island.accepted is not None
    restored = connect(serve(tmp_path / "copy", quorum=1, **PLAIN_AVERAGE))
    contribute(restored, start() + 10.0, round_number=0)
    member.move_to(restored)
    report = member.sync(1)
    assert (report.outcome, report.round, report.inner_steps) == (SyncOutcome.APPLIED, 1, 1)
    expected = before + 10.0
    if member.island.feedback is not None:
        # What the codec left out this time is all that is owed.
        expected = expected + member.island.feedback.residual
    torch.testing.assert_close(member.local, expected, rtol=0, atol=1e-5)


@pytest.fixture
def _low_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """No contribution that is accepted makes fp32 overflow; here a thousand counts as infinite in an outer step."""

    def require_low(flat: Tensor) -> None:
        if float(flat.abs().max()) > 1000:
            raise InputError("is over a thousand", field="body")

    monkeypatch.setattr("diloco.synchronizer.step.require_finite", require_low)


@pytest.mark.usefixtures("_low_ceiling")
def test_what_the_outer_step_left_out_is_kept_and_reported(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    absurd, sound = Member(connect(url)), Member(connect(url), slot=1)
    absurd.train(1e6)
    sound.train(1.0)
    pushed = absurd.exchange.begin(SyncCommand(round=0, epoch=0, deadline_s=soon()))
    assert isinstance(pushed, Pending)
    assert sound.sync(0).outcome is SyncOutcome.APPLIED
    torch.testing.assert_close(sound.local, start() + 1.0)
    left_out = absurd.exchange.finish(pushed, lambda: absurd.exchange.await_end(pushed))
    assert (left_out.outcome, left_out.detail) == (SyncOutcome.LATE, LEFT_OUT)
    assert (absurd.island.version, absurd.island.steps_since_sync) == (1, 1)
    torch.testing.assert_close(absurd.local, start() + 1.0 + 1e6)


@pytest.mark.usefixtures("_low_ceiling")
def test_a_contribution_whose_round_was_discarded_is_not_settled_by_the_round_in_its_place(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member = Member(connect(url))
    member.train(1e6)
    pushed = member.exchange.begin(SyncCommand(round=0, epoch=0, deadline_s=soon()))
    assert isinstance(pushed, Pending)
    client = connect(url)
    wait_until(lambda: not client.state(deadline_s=soon()).fragments[0].open_round.slots)
    contribute(client, start() + 5.0, round_number=0)
    report = member.exchange.finish(pushed, lambda: member.exchange.await_end(pushed))
    assert (report.outcome, report.detail) == (SyncOutcome.LATE, LEFT_OUT)
    member.train(-1e6 + 3.0)
    assert member.sync(1).inner_steps == 2
    torch.testing.assert_close(member.local, start() + 8.0)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_push_whose_answer_was_lost_counts_once_however_long_the_island_was_away(
    lossy: Lossy, tmp_path: Path, max_staleness: int
) -> None:
    options = SynchronizerSettings(port=0, directory=tmp_path, quorum=1, max_staleness=max_staleness, **PLAIN_AVERAGE)
    with served(options) as url:
        client = lossy(url)
        client.lose = 1
        member = Member(client)
        member.train(2.0)
        assert member.sync(0).outcome is SyncOutcome.FAILED
        others = lossy(url)
        assert others.wait_version(0, deadline_s=soon()) == 1
        for number in range(1, 7):
            contribute(others, start() + 2.0 + number, round_number=number)
    with served(options) as url:
        member.move_to(lossy(url))
        assert member.sync(7).outcome is SyncOutcome.APPLIED
        torch.testing.assert_close(member.local, start() + 8.0)
        assert member.island.steps_since_sync == 0


def test_the_last_contribution_of_a_slot_is_known_after_a_restart_and_told_to_that_slot_alone(
    lossy: Lossy, tmp_path: Path
) -> None:
    options = SynchronizerSettings(port=0, directory=tmp_path, quorum=1, **PLAIN_AVERAGE)
    with served(options) as url:
        member = Member(lossy(url))
        member.train(2.0)
        member.sync(0)
        for number in range(1, 5):
            contribute(lossy(url), start(), round_number=number)
    with served(options) as url:
        client = lossy(url)
        assert client.fetch(5, torch.empty(SIZE), deadline_s=soon()).applied is None
        (applied,) = client.fetch(5, torch.empty(SIZE), deadline_s=soon(), slot=0).applied or ()
        assert (applied.round, applied.into) == (0, 0)
        assert client.fetch(5, torch.empty(SIZE), deadline_s=soon(), slot=7).applied == ()
        assert client.state(deadline_s=soon(), slot=0).fragments[0].applied == applied
        assert client.state(deadline_s=soon()).fragments[0].applied is None


def test_an_island_notices_another_run_at_the_same_version_and_takes_its_progress_there(
    serve: Serve, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member(connect(serve(tmp_path / "old", quorum=1, **PLAIN_AVERAGE)))
    member.train(2.0)
    member.sync(0)
    member.train(1.0)
    other = connect(serve(tmp_path / "new", quorum=1, **PLAIN_AVERAGE))
    Member(other, slot=1)
    contribute(other, start() + 100.0, round_number=0)
    member.move_to(other)
    with caplog.at_level(logging.WARNING):
        report = member.sync(1)
    assert (report.outcome, report.inner_steps) == (SyncOutcome.APPLIED, 1)
    torch.testing.assert_close(member.local, start() + 101.0)
    assert (member.island.version, member.island.steps_since_sync) == (2, 0)
    assert [record.message for record in caplog.records if "another run" in record.message] == [
        f"the synchronizer holds another run, going on there with all local progress run={member.island.run} "
        "version=1 steps=1"
    ]


def test_nothing_of_an_old_run_is_settled_against_the_new_one(
    serve: Serve, connect: Connect, lossy: Lossy, tmp_path: Path
) -> None:
    """Neither what was accepted there, nor what may have been."""
    client = lossy(serve(tmp_path / "old", quorum=2, **PLAIN_AVERAGE))
    member = Member(client)
    member.train(2.0)
    assert member.sync(0, wait_s=0.3).outcome is SyncOutcome.FAILED
    member.train(1.0)
    client.lose = 1
    assert member.sync(0).outcome is SyncOutcome.FAILED
    assert member.island.accepted is not None
    other = connect(serve(tmp_path / "new", quorum=1, **PLAIN_AVERAGE))
    Member(other, slot=1)
    contribute(other, start() + 100.0, round_number=0)
    member.move_to(other)
    assert member.sync(1).outcome is SyncOutcome.APPLIED
    torch.testing.assert_close(member.local, start() + 103.0)


def test_another_model_in_the_new_run_is_told_and_leaves_the_island_as_it_is(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    member = Member(connect(serve(tmp_path / "old", quorum=1, **PLAIN_AVERAGE)))
    member.train(1.0)
    before = member.local.clone()
    other = connect(serve(tmp_path / "new", quorum=1, **PLAIN_AVERAGE))
    wider = Island(nn.Linear(SIZE, 1))
    Exchange(wider, other, slot=1).join(deadline_s=soon())
    member.move_to(other)
    report = member.sync()
    assert report.outcome is SyncOutcome.FAILED
    assert "differs from the run's" in report.detail
    assert torch.equal(member.local, before)
    assert member.island.steps_since_sync == 1


EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 4)),
    st.tuples(st.just("sync"), st.just(0)),
    st.tuples(st.just("lose"), st.integers(1, 2)),
    st.tuples(st.just("others"), st.integers(1, 4)),
    st.tuples(st.just("restart"), st.just(0)),
)


class Eventful:
    """An island and its synchronizer, to which things happen. Others close rounds without adding anything."""

    def __init__(self, options: SynchronizerSettings) -> None:
        self.options = options
        self.trained = 0
        self._running = ExitStack()
        self.client = self._start()
        self.member = Member(self.client)

    def _start(self) -> LossyClient:
        url = self._running.enter_context(served(self.options))
        client = lossy_client(url)
        self._running.callback(client.close)
        return client

    def close(self) -> None:
        self._running.close()

    def train(self, change: int) -> None:
        self.member.train(float(change))
        self.trained += change

    def sync(self, _: int = 0) -> None:
        self.member.sync()

    def lose(self, number: int) -> None:
        self.client.lose = number

    def others(self, number: int) -> None:
        plain, flat = SynchronizerClient(self.client._http), torch.empty(SIZE)
        for _ in range(number):
            version = plain.state(deadline_s=soon()).fragments[0].version
            plain.pull(version, flat, deadline_s=soon())
            contribute(plain, flat, round_number=version)

    def restart(self, _: int) -> None:
        lose = self.client.lose
        self.close()
        self.client = self._start()
        self.lose(lose)
        self.member.move_to(self.client)


@given(sequence=st.lists(EVENTS, min_size=2, max_size=12), max_staleness=st.sampled_from([0, 2]))
@settings(max_examples=10)
def test_all_progress_is_in_the_parameters_once_whatever_happens(
    sequence: list[tuple[str, int]], max_staleness: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        options = SynchronizerSettings(
            port=0, directory=Path(directory), quorum=1, max_staleness=max_staleness, **PLAIN_AVERAGE
        )
        run = Eventful(options)
        try:
            for name, number in sequence:
                getattr(run, name)(number)
            run.lose(0)
            # The first may find that all is in already, the second takes what was left.
            for _ in range(2):
                run.sync()
            assert run.member.island.steps_since_sync == 0
            assert torch.equal(run.member.local, start() + run.trained)
        finally:
            run.close()
