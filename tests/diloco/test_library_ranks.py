"""An island that several ranks of a training loop are together: real processes over gloo, DDP, a real synchronizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from diloco import Island
from diloco.fragment import flatten_module
from diloco.loop_ranks import BLOCK, Failure, differences, error_of
from diloco.model import build_model
from diloco.transport import SynchronizerClient
from service.errors import ConfigError, ConflictError, InputError, UnavailableError
from tests.diloco.agent.conftest import run_service
from tests.diloco.agent.test_loop_in_fleet import controller_options
from tests.diloco.conftest import wait_until
from tests.diloco.loop_rank_process import NUM_RANKS, Halves, obey, take_step
from tests.diloco.loops import TINY
from tests.diloco.rank_process import RankProcess, all_do

__all__ = ["run_service"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Serve = Callable[..., str]

NUM_STEPS = 14
TOKENS_PER_STEP = 64
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8 overlapped fragments": {"codec": "int8", "overlap_steps": 2, "fragments": 2},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@contextmanager
def started(directory: Path) -> Iterator[list[RankProcess]]:
    where = f"file://{directory}/rendezvous"
    ranks = [RankProcess(rank, where, serve=obey) for rank in range(NUM_RANKS)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RankProcess]]:
    """Two ranks, which every test lets open an island anew: to start processes takes longer than all that they do."""
    with started(tmp_path_factory.mktemp("pair")) as ranks:
        yield ranks


def options_of(url: str, **kind: Any) -> dict[str, Any]:
    return {"synchronizer": url, "slot": 0, "sync_every": 4, **kind}


def alone(url: str, num_steps: int, **kind: Any) -> Tensor:
    """Parameters of one process that takes the same steps on the same batches."""
    model = build_model(TINY, seed=0)
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), Halves(0, range(NUM_RANKS))
    with Island(model, optimizer, data, **options_of(url, **kind)) as island:
        while island.num_steps < num_steps:
            island.step(tokens=take_step(model, optimizer, data))
        return flatten_module(model).view(torch.int32)


def same(ranks: list[RankProcess]) -> Tensor:
    first, second = all_do(ranks, "bits")
    assert torch.equal(first, second)
    return first  # type: ignore[no-any-return]


@kinds
def test_two_ranks_are_one_island_that_accumulates_their_gradients_bit_for_bit(
    serve: Serve, pair: list[RankProcess], tmp_path: Path, kind: dict[str, Any]
) -> None:
    # Rank 1 begins elsewhere: what counts is the run's, which are those of rank 0.
    pair[0].tell("open", options_of(serve(tmp_path / "a"), **kind))
    pair[1].tell("open", options_of("http://127.0.0.1:9", **kind))
    assert [rank.answer() for rank in pair] == ["open"] * 2
    first, second = all_do(pair, "train", NUM_STEPS)
    assert first == second
    synced = [step for step, said in enumerate(first, start=1) if said is not None]
    delay = kind.get("overlap_steps", 0)
    assert synced == [step + delay for step in (4, 8, 12)]
    assert {said[1] for said in first if said is not None} == {"applied"}
    assert first[synced[0] - 1] == (0, "applied", 4 * TOKENS_PER_STEP)
    counts = all_do(pair, "counts")
    assert counts[0] == counts[1]
    assert counts[0]["num_tokens"] == NUM_STEPS * TOKENS_PER_STEP
    assert (counts[0]["version"], counts[0]["num_fragments"]) == (3, kind.get("fragments", 1))
    assert torch.equal(same(pair), alone(serve(tmp_path / "b"), NUM_STEPS, **kind))
    assert all_do(pair, "sync") == ["applied"] * 2
    same(pair)
    assert all_do(pair, "close") == ["closed"] * 2


def test_two_ranks_take_about_the_steps_of_one_on_whole_batches(
    serve: Serve, pair: list[RankProcess], tmp_path: Path
) -> None:
    class Whole(Halves):
        def take(self) -> list[Tensor]:
            return [next(self.stream)]

    all_do(pair, "open", options_of(serve(tmp_path / "a")))
    all_do(pair, "train", NUM_STEPS)
    mine = same(pair).view(torch.float32)
    model = build_model(TINY, seed=0)
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), Whole(0, range(1))
    with Island(model, optimizer, data, **options_of(serve(tmp_path / "b"))) as island:
        while island.num_steps < NUM_STEPS:
            island.step(tokens=take_step(model, optimizer, data))
    # Sums in another order; AdamW makes steps of about lr of gradients that are nearly nothing.
    torch.testing.assert_close(mine, flatten_module(model), rtol=0, atol=1e-3)


def test_ranks_that_are_continued_equal_ranks_that_were_not(
    serve: Serve, pair: list[RankProcess], tmp_path: Path
) -> None:
    kind = KINDS["int8 overlapped fragments"]
    expected = alone(serve(tmp_path / "a"), NUM_STEPS, **kind)
    for at_step in (3, 5, 9):
        url = serve(tmp_path / f"at-{at_step}")
        assert all_do(pair, "open", options_of(url, **kind)) == ["open"] * 2
        all_do(pair, "train", at_step)
        saved = all_do(pair, "saved")
        assert all_do(pair, "open", options_of(url, **kind, seed=7)) == ["open"] * 2
        for rank, state in zip(pair, saved, strict=True):
            rank.tell("continued", state)
        assert [rank.answer() for rank in pair] == [True] * 2
        all_do(pair, "train", NUM_STEPS)
        assert torch.equal(same(pair), expected)


def test_a_state_of_another_rank_is_refused_on_both(serve: Serve, pair: list[RankProcess], tmp_path: Path) -> None:
    all_do(pair, "open", options_of(serve(tmp_path)))
    saved = all_do(pair, "saved")
    for rank in pair:
        rank.tell("continued", saved[0])
    first, second = (rank.answer() for rank in pair)
    assert "state: is refused on another rank" in first
    assert "state: is that of rank 0 of 2, this is rank 1 of 2" in second
    # Nothing happened: they go on.
    all_do(pair, "train", 4)
    assert all_do(pair, "counts")[1]["version"] == 1


def test_a_synchronizer_that_is_away_costs_both_ranks_the_same_sync(
    spawn: Callable[..., Any], pair: list[RankProcess], tmp_path: Path
) -> None:
    process = spawn(tmp_path)
    all_do(pair, "open", options_of(process.url, timeout_s=3.0))
    all_do(pair, "train", 3)
    process.kill()
    first, second = all_do(pair, "train", 5)
    assert first == second
    assert first[0][1] == "failed"
    same(pair)
    process.start()
    for _ in range(20):  # a machine that stands still may miss a deadline of 3 s
        outcomes = all_do(pair, "sync")
        assert outcomes[0] == outcomes[1]
        if outcomes[0] == "applied":
            break
    assert all_do(pair, "counts")[1]["steps_since_sync"] == 0
    same(pair)


def test_a_run_that_cannot_be_joined_is_told_on_both_ranks(pair: list[RankProcess]) -> None:
    answers = all_do(pair, "open", options_of("http://127.0.0.1:9", timeout_s=0.5))
    for answer in answers:
        assert answer.startswith("UnavailableError: synchronizer: http://127.0.0.1:9")
        assert "start it there" in answer


def test_a_rank_that_dies_in_a_sync_leaves_the_others_with_the_parameters_that_they_had(
    serve: Serve, connect: Callable[[str], SynchronizerClient], tmp_path: Path
) -> None:
    url = serve(tmp_path, quorum=2)
    client = connect(url)
    with started(tmp_path) as ranks:
        all_do(ranks, "open", options_of(url, wrapped=False))
        all_do(ranks, "train", 3)
        ranks[0].tell("train", 4)
        ranks[1].tell("train", 4)
        # Rank 0 has contributed, and waits for another island; rank 1 for rank 0.
        wait_until(lambda: state_of(client).open_round.slots == (0,))
        ranks[1].kill()
        size = state_of(client).num_bytes // 4
        client.push(torch.zeros(size), round=0, slot=1, epoch=0, tokens=1000, deadline_s=time.time() + 60)
        answer = ranks[0].answer()
        assert answer.startswith("PeerLostError"), answer
        ranks[0].tell("bits")
        left = ranks[0].answer().view(torch.float32)
        assert state_of(client).version == 1, "rank 0 was given new parameters, which rank 1 never had"
        new = torch.empty(size)
        client.pull(1, new, deadline_s=time.time() + 60)
        # Four steps away from where it began, and not what the round made of it.
        assert float((left - new).norm()) > 1
        model = build_model(TINY, seed=0)
        optimizer, data = torch.optim.AdamW(model.parameters(), lr=3e-3), Halves(0, range(NUM_RANKS))
        for _ in range(4):
            take_step(model, optimizer, data)
        assert torch.equal(left, flatten_module(model))
        ranks[0].tell("train", 5)
        assert "island: is closed" in ranks[0].answer()


def state_of(client: SynchronizerClient) -> Any:
    return client.state(deadline_s=time.time() + 60).fragments[0]


def test_ranks_that_have_come_apart_are_told_before_anything_is_sent(
    serve: Serve, pair: list[RankProcess], connect: Callable[[str], SynchronizerClient], tmp_path: Path
) -> None:
    url = serve(tmp_path)
    all_do(pair, "open", options_of(url, wrapped=False))
    all_do(pair, "train", 3)
    pair[1].tell("nudge")
    assert pair[1].answer() == "nudged"
    for answer in all_do(pair, "train", 4):
        assert answer.startswith("RanksDifferError: process_group: the ranks' parameters differ (wrap the module")
    assert state_of(connect(url)).version == 0


def test_ranks_at_other_steps_are_told(serve: Serve, pair: list[RankProcess], tmp_path: Path) -> None:
    all_do(pair, "open", options_of(serve(tmp_path), wrapped=False))
    pair[0].tell("train", 2)
    pair[1].tell("close")
    # Rank 1 waits for what rank 0 does at its end, rank 0 for a step of rank 1: gloo sees that they do not fit.
    answers = [rank.answer() for rank in pair]
    assert all(isinstance(answer, str) and "Error" in answer for answer in answers), answers


def test_ranks_are_paused_directed_and_sent_away_together(
    serve: Serve, pair: list[RankProcess], run_service: Callable[..., Any], tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync")
    options = controller_options(tmp_path, url, "--mode", "per_island", "--num-fragments", "2", "--num-slots", "1")
    controller = run_service("controller", *options, "--policy-params", '{"h": 40}')

    def control(**order: Any) -> None:
        httpx.post(f"{controller.url}/v1/control", json=order, timeout=10, trust_env=False).raise_for_status()

    chosen = {"controller": controller.url, "name": "loop", "wrapped": True}
    assert all_do(pair, "open", chosen) == ["open"] * 2
    assert all_do(pair, "counts")[1]["num_fragments"] == 2
    num_steps = 0
    version = 0
    while version < 3:
        num_steps += 60
        assert num_steps < 60_000, "the controller never directs a sync"
        first, second = all_do(pair, "train", num_steps)
        assert first == second
        version = all_do(pair, "counts")[1]["version"]
    same(pair)
    control(action="pause")
    for rank in pair:
        rank.tell("train", num_steps + 100_000)
    controller.until(lambda: controller.get("/v1/fleet").json())
    control(action="resume")
    control(action="drain", slot=0, when="now")
    for rank in pair:
        assert "slot: the controller has taken slot 0 back" in rank.answer()


def test_a_group_that_is_not_there_and_ddp_without_one_are_refused() -> None:
    arguments: dict[str, Any] = {"synchronizer": "http://127.0.0.1:9", "slot": 0, "sync_every": 1, "timeout_s": 0.2}
    with pytest.raises(ConfigError, match=r"process_group: torch.distributed is not initialized \(call"):
        Island(nn.Linear(2, 2), process_group="world", **arguments)
    with pytest.raises(ConfigError, match=r"rank_timeout_s: .*got 0"):
        Island(nn.Linear(2, 2), rank_timeout_s=0, **arguments)


def test_ddp_that_the_island_is_not_told_of_is_refused(pair: list[RankProcess]) -> None:
    for answer in all_do(pair, "open", {**options_of("http://127.0.0.1:9"), "process_group": None}):
        assert answer.startswith("ConfigError: process_group: is missing, and the module is trained by 2 ranks"), answer


@pytest.mark.parametrize(
    ("kind", "raised"),
    [("ConflictError", ConflictError), ("InputError", InputError), ("KeyError", UnavailableError)],
)
def test_errors_of_rank_0_are_raised_as_they_are_where_their_kind_is_known(kind: str, raised: type[Exception]) -> None:
    error = error_of(Failure(kind=kind, message="went wrong", field="slot", remedy="do it"))
    assert type(error) is raised
    assert str(error) == "slot: went wrong (do it)"


def test_only_what_differs_by_a_bit_is_sent() -> None:
    before = torch.zeros(3 * BLOCK + 5)
    after = before.clone()
    assert differences(before, after) == []
    after[0] = -0.0  # another bit, the same number
    assert differences(before, after) == [(0, BLOCK)]
    after[BLOCK] = 1.0
    after[-1] = 1.0
    assert differences(before, after) == [(0, 2 * BLOCK), (3 * BLOCK, 3 * BLOCK + 5)]
    after[:] = float("nan")
    assert differences(after, after.clone()) == []
