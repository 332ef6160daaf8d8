"""Islands with codecs against a real synchronizer: what is pushed, what is owed, and what training comes to."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.codec import CODECS
from diloco.data import TokenStream
from diloco.exchange import Exchange
from diloco.fragment import flatten_module, unflatten_into
from diloco.inner import InnerConfig, InnerLoop
from diloco.island import Island
from diloco.model import ModelSize, build_model, next_byte_loss
from diloco.protocol import SyncCommand
from diloco.schema import CodecName, SyncOutcome, SyncReport
from diloco.syncs import Pending
from diloco.transport import SynchronizerClient
from service.errors import UnavailableError

SIZE = 200
PLAIN_AVERAGE = {"outer_lr": 1.0, "outer_momentum": 0.0, "grace_max_s": 0.0}
LOSSY: tuple[CodecName, ...] = ("bf16", "int8", "int4")

Serve = Callable[..., str]
Connect = Callable[[str], SynchronizerClient]


def soon() -> float:
    return time.time() + 20


def noise(seed: int) -> Tensor:
    return 0.01 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def local(island: Island) -> Tensor:
    return flatten_module(island.module)


def owed(island: Island) -> Tensor:
    assert island.feedback is not None
    return island.feedback.residual.clone()


class Member:
    """An island of two hundred parameters that joined a run."""

    def __init__(self, client: SynchronizerClient, codec: CodecName, *, slot: int = 0) -> None:
        module = nn.Linear(SIZE - 1, 1)
        unflatten_into(torch.linspace(-1, 1, SIZE), module)
        self.island = Island(module, CODECS[codec])
        self.exchange = Exchange(self.island, client, slot=slot)
        self.exchange.join(deadline_s=soon())

    def train(self, seed: int) -> None:
        unflatten_into(local(self.island) - noise(seed), self.island.module)
        self.island.count_step(10)

    def command(self, round_number: int | None, *, wait_s: float = 20.0) -> SyncCommand:
        return SyncCommand(round=round_number, epoch=0, deadline_s=time.time() + wait_s)

    def sync(self, round_number: int | None = None, *, wait_s: float = 20.0) -> SyncReport:
        report = self.exchange.run(self.command(round_number, wait_s=wait_s))
        assert report is not None
        return report

    def begin(self, round_number: int) -> Pending:
        pending = self.exchange.begin(self.command(round_number))
        assert isinstance(pending, Pending)
        return pending

    def finish(self, pending: Pending) -> SyncReport:
        return self.exchange.finish(pending, lambda: self.exchange.await_end(pending))


def contribute(client: SynchronizerClient, flat: Tensor, *, round_number: int, slot: int) -> None:
    """What another island would do."""
    client.push(flat, round=round_number, slot=slot, epoch=0, tokens=10, deadline_s=soon())


@pytest.mark.parametrize("codec", CODECS)
def test_a_sync_reports_the_bytes_that_travelled(
    serve: Serve, connect: Connect, tmp_path: Path, codec: CodecName
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE)), codec)
    member.train(1)
    report = member.sync(0)
    assert report.outcome is SyncOutcome.APPLIED
    assert report.bytes_pushed == CODECS[codec].num_bytes(SIZE)
    assert report.bytes_pulled == 4 * SIZE


@pytest.mark.parametrize("codec", LOSSY)
def test_global_progress_and_what_is_owed_is_all_that_was_trained(
    serve: Serve, connect: Connect, tmp_path: Path, codec: CodecName
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE)), codec)
    trained = torch.zeros(SIZE)
    for number in range(6):
        member.train(number)
        trained += noise(number)
        assert member.sync(number).outcome is SyncOutcome.APPLIED
        assert torch.equal(local(member.island), member.island.global_flat)
    progress = torch.linspace(-1, 1, SIZE) - member.island.global_flat
    assert not torch.allclose(progress, trained, rtol=0, atol=1e-6)
    torch.testing.assert_close(progress + owed(member.island), trained, rtol=0, atol=1e-6)


def test_two_islands_with_different_codecs_share_a_round(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    members = [Member(connect(url), "int4"), Member(connect(url), "fp32", slot=1)]
    for number in range(3):
        for slot, member in enumerate(members):
            member.train(10 * number + slot)
        pending = [member.begin(number) for member in members]
        reports = [member.finish(begun) for member, begun in zip(members, pending, strict=True)]
        assert {report.outcome for report in reports} == {SyncOutcome.APPLIED}
    assert torch.equal(local(members[0].island), local(members[1].island))
    trained = sum(noise(10 * number + slot) for number in range(3) for slot in range(2)) / 2
    # Half of what the first island still owes has yet to come.
    still_owed = owed(members[0].island) / 2
    progress = torch.linspace(-1, 1, SIZE) - members[0].island.global_flat
    torch.testing.assert_close(progress + still_owed, trained, rtol=0, atol=1e-6)


def test_a_late_contribution_owes_nothing_and_its_progress_comes_again(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)

    class Overtaken(SynchronizerClient):
        """Another island closes the round between our look at the state and our push."""

        def push(self, *arguments: Any, **keywords: Any) -> Any:
            if keywords["round"] == 0:
                contribute(connect(url), torch.zeros(SIZE), round_number=0, slot=1)
                connect(url).wait_version(0, deadline_s=soon())
            return super().push(*arguments, **keywords)

    member = Member(Overtaken(connect(url)._http), "int4")
    member.train(1)
    assert member.sync(0).outcome is SyncOutcome.LATE
    assert not owed(member.island).any()
    torch.testing.assert_close(local(member.island), -noise(1))
    assert member.sync(1).outcome is SyncOutcome.APPLIED
    torch.testing.assert_close(local(member.island) - owed(member.island), -noise(1), rtol=0, atol=1e-7)


def test_a_contribution_that_a_newer_one_replaced_is_not_owed_for(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2, **PLAIN_AVERAGE)
    member = Member(connect(url), "int4")
    member.train(1)
    assert member.sync(0, wait_s=0.3).outcome is SyncOutcome.FAILED
    assert not owed(member.island).any()
    member.train(2)
    pending = member.begin(0)
    contribute(connect(url), torch.linspace(-1, 1, SIZE), round_number=0, slot=1)
    assert member.finish(pending).outcome is SyncOutcome.APPLIED
    progress = torch.linspace(-1, 1, SIZE) - member.island.global_flat
    # Weights are tokens: 20 of ours, 10 of the other's, which did not move.
    torch.testing.assert_close(progress * 3 / 2 + owed(member.island), noise(1) + noise(2), rtol=0, atol=1e-6)


def test_a_push_whose_answer_was_lost_is_owed_for_once(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    class LostAnswers(SynchronizerClient):
        lose_next = True

        def push(self, *arguments: Any, **keywords: Any) -> Any:
            reply = super().push(*arguments, **keywords)
            if self.lose_next:
                self.lose_next = False
                raise UnavailableError("the answer was lost")
            return reply

    url = serve(tmp_path, quorum=1, **PLAIN_AVERAGE)
    member = Member(LostAnswers(connect(url)._http), "int4")
    member.train(1)
    assert member.sync(0).outcome is SyncOutcome.FAILED
    member.train(2)
    connect(url).wait_version(0, deadline_s=soon())
    assert member.sync(0).outcome is SyncOutcome.APPLIED
    progress = torch.linspace(-1, 1, SIZE) - member.island.global_flat
    torch.testing.assert_close(progress + owed(member.island), noise(1), rtol=0, atol=1e-6)
    assert member.island.steps_since_sync == 1


def test_a_stale_contribution_is_owed_for_once_its_later_round_has_closed(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=1, max_staleness=2, **PLAIN_AVERAGE)
    member = Member(connect(url), "int4")
    member.train(1)
    contribute(connect(url), torch.zeros(SIZE), round_number=0, slot=1)
    connect(url).wait_version(0, deadline_s=soon())
    assert member.sync(0).outcome is SyncOutcome.STALE
    torch.testing.assert_close(local(member.island), -noise(1), rtol=0, atol=1e-6)
    assert not owed(member.island).any()
    carried = member.island.accepted
    assert carried is not None
    assert carried.encoded is not None
    left_out = carried.encoded.left_out.clone()
    contribute(connect(url), torch.zeros(SIZE), round_number=1, slot=1)
    connect(url).wait_version(1, deadline_s=soon())
    pending = member.begin(2)
    assert left_out.any()
    assert torch.equal(owed(member.island), left_out)
    assert member.finish(pending).outcome is SyncOutcome.APPLIED
    assert not torch.equal(owed(member.island), left_out)
    # Of two contributions with ten tokens each, one was a version behind. Then what it owed came alone.
    merged = (noise(1) - left_out) * 2**-0.5 / 2
    rest = left_out - owed(member.island)
    torch.testing.assert_close(-member.island.global_flat, merged + rest, rtol=0, atol=1e-6)


def test_progress_that_is_not_finite_is_given_up_with_what_is_owed(
    serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    member = Member(connect(serve(tmp_path, quorum=1, **PLAIN_AVERAGE)), "int4")
    member.train(1)
    member.sync(0)
    assert owed(member.island).any()
    unflatten_into(local(member.island) * float("inf"), member.island.module)
    member.island.count_step(10)
    report = member.sync(1)
    assert report.outcome is SyncOutcome.FAILED
    assert "not finite" in report.detail
    assert not owed(member.island).any()
    assert torch.equal(local(member.island), member.island.global_flat)


TINY = ModelSize(num_layers=2, num_heads=2, width=32, context=32)
NUM_ROUNDS, STEPS_PER_ROUND, NUM_ISLANDS = 20, 12, 2


def trained_loss(url: str, connect: Connect, codec: CodecName) -> tuple[float, float]:
    """Loss on text that nobody trained on, before and after some rounds of two islands."""
    text = "".join(f"{i} squared is {i * i}, and {i} and one is {i + 1}\n" for i in range(4000)).encode()
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = corpus[-33 * 64 :].view(64, 33).long()
    islands, loops, streams, exchanges = [], [], [], []
    for slot in range(NUM_ISLANDS):
        module = build_model(TINY, seed=0)
        islands.append(Island(module, CODECS[codec]))
        loops.append(InnerLoop(module, InnerConfig(warmup_steps=10, lr=3e-3)))
        streams.append(
            TokenStream(corpus[: -33 * 64], slot=slot, num_shards=2, seed=0, batch_size=8, length=TINY.context)
        )
        exchanges.append(Exchange(islands[-1], connect(url), slot=slot))
        exchanges[-1].join(deadline_s=soon())

    def loss() -> float:
        with torch.no_grad():
            return float(next_byte_loss(islands[0].module, held_out))

    before = loss()
    for number in range(NUM_ROUNDS):
        begun = []
        for island, loop, stream, exchange in zip(islands, loops, streams, exchanges, strict=True):
            for _ in range(STEPS_PER_ROUND):
                loop.take_step(stream.next_batch())
                island.count_step(256)
            begun.append(exchange.begin(SyncCommand(round=number, epoch=0, deadline_s=soon())))
        for exchange, pending in zip(exchanges, begun, strict=True):
            assert isinstance(pending, Pending)
            report = exchange.finish(pending, lambda e=exchange, p=pending: e.await_end(p))  # type: ignore[misc]
            assert report.outcome is SyncOutcome.APPLIED
    assert torch.equal(local(islands[0]), local(islands[1]))
    return before, loss()


def test_training_with_four_bits_comes_to_the_loss_of_fp32(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    start, plain = trained_loss(serve(tmp_path / "fp32", quorum=2), connect, "fp32")
    _, compressed = trained_loss(serve(tmp_path / "int4", quorum=2), connect, "int4")
    _, both_ways = trained_loss(serve(tmp_path / "both", quorum=2, pull_codec="int4"), connect, "int4")
    assert plain < 0.6 * start
    assert compressed == pytest.approx(plain, rel=0.03)
    assert both_ways == pytest.approx(plain, rel=0.03)
