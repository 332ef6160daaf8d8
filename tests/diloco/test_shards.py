"""Islands against several synchronizers that share the fragments of their run, over HTTP in this process."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from diloco.errors import ManifestError
from diloco.fragment import flatten_module, unflatten_into
from diloco.protocol import SyncCommand
from diloco.schema import SyncOutcome, SyncReport
from diloco.sharding import SynchronizerShard
from diloco.shards import Shards
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.synchronizer.config import SynchronizerSettings
from diloco.syncs import Pending
from diloco.transport import SynchronizerClient
from service.errors import ConfigError, InputError, UnavailableError
from tests.diloco.conftest import served
from tests.diloco.loops import Loop

OUTER = {"quorum": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "grace_max_s": 0.0}
NUM_FRAGMENTS = 4
SIZE = 4 * 5

Serve = Callable[..., str]
Reach = Callable[..., Shards]


def model(*, start: float = 0.0) -> nn.Module:
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(5)) for name in "abcd"})
    unflatten_into(torch.arange(SIZE, dtype=torch.float32) + start, module)
    return module


def soon() -> float:
    return time.time() + 20


@pytest.fixture
def reach() -> Iterator[Reach]:
    """Clients of synchronizers by their URLs."""
    opened: list[Shards] = []

    def start(*urls: str) -> Shards:
        http = [httpx.Client(base_url=url, timeout=5, trust_env=False) for url in urls]
        opened.append(Shards([SynchronizerClient(one) for one in http]))
        return opened[-1]

    yield start
    for shards in opened:
        shards.close()


class Member:
    """An island that joined a run."""

    def __init__(
        self, shards: Shards, *, slot: int = 0, num_fragments: int | None = NUM_FRAGMENTS, start: float = 0.0
    ) -> None:
        self.island = StreamingIsland(model(start=start))
        self.shards = shards
        self.slot = slot
        self.exchange = StreamingExchange(self.island, shards, slot=slot)
        self.num_fragments = num_fragments

    def join(self, *, wait_s: float = 20.0) -> Member:
        self.exchange.join(deadline_s=time.time() + wait_s, num_fragments=self.num_fragments)
        return self

    def train(self, change: float) -> None:
        unflatten_into(self.local + change * torch.arange(1, SIZE + 1) / SIZE, self.island.module)
        self.island.count_step(10 + self.slot)

    def order(self, number: int | None, *, wait_s: float = 20.0) -> SyncCommand:
        return SyncCommand(round=number, epoch=0, deadline_s=time.time() + wait_s)

    def sync(self, number: int | None, *, wait_s: float = 20.0) -> SyncReport:
        report = self.exchange.run(self.order(number, wait_s=wait_s))
        assert report is not None
        return report

    @property
    def local(self) -> Tensor:
        return flatten_module(self.island.module)

    @property
    def versions(self) -> list[int]:
        return [fragment.version for fragment in self.island.fragments]


def sync_all(members: list[Member], number: int | None) -> list[SyncReport]:
    """All come to the round, the last one on this thread."""
    begun = [member.exchange.begin(member.order(number)) for member in members[:-1]]
    last = members[-1].sync(number)
    ended = []
    for member, pending in zip(members, begun, strict=False):
        assert isinstance(pending, Pending)
        ended.append(member.exchange.finish(pending, lambda m=member, p=pending: m.exchange.await_end(p)))  # type: ignore[misc]
    return [*ended, last]


def serve_shards(serve: Serve, directory: Path, count: int = 2, **settings: Any) -> list[str]:
    return [serve(directory / f"shard-{index}", shard=f"{index}/{count}", **OUTER | settings) for index in range(count)]


def bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int32)


def trained(shards: list[Shards], num_rounds: int) -> Tensor:
    """Parameters of two islands after so many rounds, and progress beside them."""
    members = [Member(each, slot=slot) for slot, each in enumerate(shards)]
    for member in members:
        member.join()
    for number in range(num_rounds):
        for member in members:
            member.train(0.1 * (member.slot + 1))
        reports = sync_all(members, number)
        assert [(report.outcome, report.round) for report in reports] == [(SyncOutcome.APPLIED, number)] * 2
    assert torch.equal(bits(members[0].island.global_flat), bits(members[1].island.global_flat))
    assert members[0].versions == [num_rounds // 4 + (index < num_rounds % 4) for index in range(4)]
    return torch.cat([member.local for member in members])


def test_several_synchronizers_make_what_one_makes_bit_for_bit(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    alone = serve(tmp_path / "alone", **OUTER)
    expected = trained([reach(alone) for _ in range(2)], 10)
    for count in (2, 3, 4):
        urls = serve_shards(serve, tmp_path / str(count), count)
        assert torch.equal(bits(trained([reach(*urls) for _ in range(2)], 10)), bits(expected))


def test_each_synchronizer_holds_its_own_fragments_and_says_which(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)
    before = reach(*urls).look_at_all(deadline_s=soon())
    assert [before.states[index].shard.num_fragments for index in (0, 1)] == [None, None]  # type: ignore[union-attr]
    Member(reach(*urls)).join()
    look = reach(*urls).look_at_all(deadline_s=soon())
    for index, state in look.states.items():
        assert state.shard is not None
        assert (state.shard.index, state.shard.num_shards, state.shard.num_fragments) == (index, 2, 4)
        assert [fragment.fragment for fragment in state.fragments] == [index, index + 2]
        assert state.manifest is not None
        assert len(state.manifest.tensors) == 4
        folders = {path.name for path in (tmp_path / f"shard-{index}" / "fragments").iterdir()}
        assert folders == {f"{index:04d}-of-0004", f"{index + 2:04d}-of-0004", "shard.json"}
    assert len(look.origins) == 1


def test_a_fragment_of_another_synchronizer_is_refused(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)
    Member(reach(*urls)).join()
    astray = SynchronizerClient(httpx.Client(base_url=urls[0], timeout=5, trust_env=False)).of(3)
    for attempt in (
        lambda: astray.pull(0, torch.empty(5), deadline_s=soon()),
        lambda: astray.push(torch.zeros(5), round=0, slot=0, epoch=0, tokens=1, deadline_s=soon()),
    ):
        with pytest.raises(
            InputError, match=r"fragment 3 does not live here: this is shard 0/2, and it lives on shard 1"
        ):
            attempt()
    astray.close()


def test_synchronizers_in_the_wrong_order_or_number_are_refused(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)
    alone = serve(tmp_path / "alone")
    for given in ([urls[1], urls[0]], [urls[0]], [urls[0], urls[0]], [urls[0], alone], [alone, alone], [*urls, alone]):
        with pytest.raises(InputError, match="in the order of their --shard"):
            Member(reach(*given)).join()


def test_fewer_fragments_than_synchronizers_are_refused(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)
    for number in (1, None):
        with pytest.raises(InputError, match=r"there are 2, each .*and the run has 1 .*--num-fragments 2 or more"):
            Member(reach(*urls), num_fragments=number).join()


def test_islands_with_other_parameters_begin_one_run_together(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    urls = serve_shards(serve, tmp_path, 3, quorum=1)
    members = [Member(reach(*urls), slot=slot, start=100.0 * slot) for slot in range(4)]
    with ThreadPoolExecutor(len(members)) as threads:
        list(threads.map(Member.join, members))
    for member in members:
        assert torch.equal(member.local, members[0].local)
    assert torch.equal(members[0].local - members[0].local[0], torch.arange(float(SIZE))), (
        "of one island, and no mixture"
    )


def test_a_run_that_began_on_some_is_begun_by_whoever_has_its_parameters(
    serve: Serve, reach: Reach, tmp_path: Path
) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)

    class Gone(Shards):
        def offer(self, index: int, *arguments: Any, **keywords: Any) -> Any:
            if index == 1:
                raise UnavailableError("the island died")
            return super().offer(index, *arguments, **keywords)

    half = Gone([SynchronizerClient(httpx.Client(base_url=url, timeout=5, trust_env=False)) for url in urls])
    with pytest.raises(UnavailableError, match="the island died"):
        Member(half).join()
    half.close()
    other = Member(reach(*urls), slot=1, start=100.0)
    with pytest.raises(UnavailableError, match=rf"{urls[1]} has no part of the run.*new --directory on all"):
        other.join(wait_s=1.0)
    begun = Member(reach(*urls)).join()
    other.join()
    assert torch.equal(other.local, begun.local)
    assert other.versions == [0] * 4


def test_an_island_joins_at_the_versions_that_the_synchronizers_are_at(
    serve: Serve, reach: Reach, tmp_path: Path
) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)
    first = Member(reach(*urls)).join()
    for number in range(5):
        first.train(1.0)
        assert first.sync(number).round == number
    second = Member(reach(*urls), slot=1, num_fragments=None, start=50.0).join()
    assert second.versions == [2, 1, 1, 1]
    assert second.island.version == 5
    assert torch.equal(second.local, first.island.global_flat)
    with pytest.raises(ManifestError, match="it has 4 fragments against 2 here"):
        Member(reach(*urls), slot=2, num_fragments=2).join()


def test_synchronizers_of_different_runs_are_refused(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    one = serve_shards(serve, tmp_path / "one", quorum=1)
    other = serve_shards(serve, tmp_path / "other", quorum=1)
    member = Member(reach(*one)).join()
    Member(reach(*other), start=100.0).join()
    with pytest.raises(ManifestError, match="holds another run than the other synchronizers"):
        Member(reach(one[0], other[1])).join()
    assert member.sync(0).outcome is SyncOutcome.APPLIED


class Switchable:
    """Synchronizers in threads that can go away and come back at the same address."""

    def __init__(self, directory: Path, count: int = 2, **settings: Any) -> None:
        self._settings = [
            SynchronizerSettings(
                port=0, directory=directory / f"s{index}", shard=f"{index}/{count}", **OUTER | settings
            )
            for index in range(count)
        ]
        self._contexts: list[Any] = [None] * count
        self.urls = [""] * count
        for index in range(count):
            self.start(index)

    def start(self, index: int) -> None:
        port = int(self.urls[index].rpartition(":")[2] or 0)
        self._contexts[index] = served(self._settings[index].model_copy(update={"port": port}))
        self.urls[index] = self._contexts[index].__enter__()

    def stop(self, index: int) -> None:
        context, self._contexts[index] = self._contexts[index], None
        context.__exit__(None, None, None)

    def close(self) -> None:
        for index, context in enumerate(self._contexts):
            if context is not None:
                self.stop(index)


@pytest.fixture
def switchable() -> Iterator[Callable[..., Switchable]]:
    made: list[Switchable] = []

    def make(directory: Path, **settings: Any) -> Switchable:
        made.append(Switchable(directory, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_while_one_is_away_only_its_fragments_do_not_sync(
    switchable: Callable[..., Switchable], reach: Reach, tmp_path: Path
) -> None:
    both = switchable(tmp_path)
    members = [Member(reach(*both.urls), slot=slot).join() for slot in range(2)]

    def run_round(number: int | None) -> list[SyncReport]:
        for member in members:
            member.train(0.5)
        return sync_all(members, number)

    assert [report.round for report in run_round(0)] == [0, 0]
    both.stop(1)
    # Directed to what is away, or by nobody: the others take their turn, also again and again.
    for number, taken in ((1, 2), (None, 4), (1, 6)):
        for report in run_round(number):
            assert (report.outcome, report.round) == (SyncOutcome.APPLIED, taken)
            assert both.urls[1] in report.detail
            assert "ConnectError" in report.detail
    assert members[0].versions == [2, 0, 2, 0]
    assert members[0].island.version == 1
    both.start(1)
    for number, steps in ((1, 5), (3, 6), (5, 2)):
        for report in run_round(number):
            assert (report.outcome, report.round, report.detail) == (SyncOutcome.APPLIED, number, "")
            assert report.inner_steps == steps, "also those that were taken while it was away"
    for member in members:
        assert member.versions == [2, 2, 2, 1]
        assert torch.equal(bits(member.island.global_flat), bits(members[0].island.global_flat))


def test_a_sync_fails_with_the_reason_when_all_are_away_and_nothing_is_lost(
    switchable: Callable[..., Switchable], reach: Reach, tmp_path: Path
) -> None:
    both = switchable(tmp_path, quorum=1)
    member = Member(reach(*both.urls)).join()
    member.train(1.0)
    for index in (0, 1):
        both.stop(index)
    report = member.sync(0, wait_s=2.0)
    assert report.outcome is SyncOutcome.FAILED
    assert all(url in report.detail for url in both.urls)
    for index in (0, 1):
        both.start(index)
    assert member.sync(0).outcome is SyncOutcome.APPLIED
    assert member.versions == [1, 0, 0, 0]


def test_a_restart_is_waited_for(switchable: Callable[..., Switchable], reach: Reach, tmp_path: Path) -> None:
    both = switchable(tmp_path, quorum=1)
    member = Member(reach(*both.urls)).join()
    member.train(1.0)
    assert member.sync(0).round == 0
    both.stop(1)
    back = threading.Timer(0.5, both.start, (1,))
    back.start()
    report = member.sync(1, wait_s=120.0)
    back.join()
    assert (report.outcome, report.round, report.detail) == (SyncOutcome.APPLIED, 1, "")


def test_a_synchronizer_that_dies_while_its_round_is_open_fails_that_sync_with_the_reason(
    switchable: Callable[..., Switchable], reach: Reach, tmp_path: Path
) -> None:
    both = switchable(tmp_path)
    members = [Member(reach(*both.urls), slot=slot).join() for slot in range(2)]
    sync_all(members, 0)
    members[0].train(1.0)
    pending = members[0].exchange.begin(members[0].order(1, wait_s=4.0))
    assert isinstance(pending, Pending)
    both.stop(1)
    report = members[0].exchange.finish(pending, lambda: members[0].exchange.await_end(pending))
    assert report.outcome is SyncOutcome.FAILED
    assert both.urls[1] in report.detail
    both.start(1)
    members[1].train(1.0)
    assert [(one.outcome, one.round) for one in sync_all(members, 1)] == [(SyncOutcome.APPLIED, 1)] * 2
    assert members[0].island.fragments[1].steps_since_sync == 0, "what was accepted before it went is in the round"


def test_one_that_lost_its_disk_is_given_what_the_islands_hold_of_it(
    switchable: Callable[..., Switchable], reach: Reach, tmp_path: Path
) -> None:
    both = switchable(tmp_path, quorum=1)
    member = Member(reach(*both.urls)).join()
    for number in range(6):
        member.train(1.0)
        member.sync(number)
    held = member.island.fragments[1].global_flat.clone()
    both.stop(1)
    (tmp_path / "s1").rename(tmp_path / "lost")
    both.start(1)
    newcomer = Member(reach(*both.urls), slot=1, num_fragments=None, start=100.0)
    with pytest.raises(UnavailableError, match="no part of the run"):
        newcomer.join(wait_s=1.0)
    member.train(1.0)
    assert member.sync(6).outcome is SyncOutcome.APPLIED
    newcomer.join()
    assert newcomer.versions == [2, 1, 1, 0]
    # Round 6 meant whatever is next there: the lost fragment 1, which began from what the island held.
    assert torch.equal(newcomer.island.fragments[0].global_flat, member.island.fragments[0].global_flat)
    assert not torch.equal(newcomer.island.fragments[1].global_flat, held)


@pytest.mark.parametrize("text", ["1", "2/2", "0/1", "-1/2", "a/b", "0/2000", "1/2/3"])
def test_a_shard_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="INDEX/COUNT"):
        SynchronizerSettings(directory=tmp_path, shard=text)


def test_a_directory_belongs_to_one_shard(serve: Serve, reach: Reach, tmp_path: Path) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)
    Member(reach(*urls)).join()
    alone = serve(tmp_path / "alone")
    Member(reach(alone)).join()
    for folder, shard, said in (
        ("shard-0", "1/2", r"holds shard 0/2 of a run, not 1/2.*give --shard 0/2"),
        ("shard-0", None, r"holds one of several shards of a run"),
        ("alone", "0/2", r"holds a run that is not shared"),
    ):
        copy = tmp_path / f"copy-{folder}-{(shard or 'none')[:1]}"
        shutil.copytree(tmp_path / folder, copy)
        with pytest.raises(ConfigError, match=said):
            serve(copy, shard=shard)


def test_every_fragment_has_one_place() -> None:
    for count in (2, 3, 5):
        shards = [SynchronizerShard(index, count) for index in range(count)]
        for number in range(count, 12):
            owned = [shard.fragments_of(number) for shard in shards]
            assert sorted(fragment for own in owned for fragment in own) == list(range(number))
            assert max(map(len, owned)) - min(map(len, owned)) <= 1
            assert all(shard.owns(fragment) for shard, own in zip(shards, owned, strict=True) for fragment in own)


def library_loops(urls: list[str]) -> list[Tensor]:
    """Two loops of one's own, after 8 syncs of 4 fragments."""
    first = Loop(0, ",".join(urls), options={"fragments": NUM_FRAGMENTS})
    loops = [first, Loop(1, ",".join(urls), options={"fragments": NUM_FRAGMENTS})]
    with ThreadPoolExecutor(len(loops)) as threads:
        list(threads.map(lambda loop: loop.train(40), loops))
    assert [loop.island.version for loop in loops] == [8, 8]
    for loop in loops:
        loop.island.close()
    return [flatten_module(loop.model) for loop in loops]


def test_loops_of_ones_own_sync_with_several_and_end_as_with_one(serve: Serve, tmp_path: Path) -> None:
    alone = library_loops([serve(tmp_path / "alone", **OUTER)])
    shared = library_loops(serve_shards(serve, tmp_path))
    for found, expected in zip(shared, alone, strict=True):
        assert torch.equal(bits(found), bits(expected))


def test_a_loop_of_ones_own_goes_on_from_its_state_with_several(serve: Serve, tmp_path: Path) -> None:
    urls = serve_shards(serve, tmp_path, quorum=1)
    options = {"fragments": NUM_FRAGMENTS}
    loop = Loop(0, ",".join(urls), options=options).train(33)
    saved, before = loop.saved(), flatten_module(loop.model)
    loop.island.close()
    again = Loop(0, ",".join(urls), options=options)
    assert again.continued(saved)
    assert torch.equal(bits(flatten_module(again.model)), bits(before))
    assert again.island.version == 6
    assert again.train(40).island.version == 8
    again.island.close()
    with pytest.raises(ConfigError, match="fragments 1 is below the 2 synchronizers"):
        Loop(0, ",".join(urls), options={"fragments": 1})
