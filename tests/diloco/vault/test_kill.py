"""A worker that is killed at any moment, and goes on from its vault, ends with the weights of one that was not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.schema import Rung
from diloco.transport import SynchronizerClient
from diloco.turns import place_of
from tests.diloco.conftest import wait_until
from tests.diloco.vault.conftest import DEADLINE_S, Slot, StartSlot, outer_state, syncs_at, until_version

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Serve = Callable[..., str]
STEPS = (60, 130, 200)


def undisturbed(start_slot: StartSlot, url: str, *, steps: Sequence[int] = STEPS, **options: Any) -> list[str]:
    overlap_steps = options.pop("overlap_steps", None)
    slot = start_slot(url, name="undisturbed", **options)
    slot.plan(*syncs_at(*steps, overlap_steps=overlap_steps))
    slot.train()
    return until_version(url, len(steps))


def begun(start_slot: StartSlot, url: str, *, steps: Sequence[int] = STEPS, **options: Any) -> Slot:
    overlap_steps = options.pop("overlap_steps", None)
    slot = start_slot(url, name="killed", **options)
    slot.plan(*syncs_at(*steps, overlap_steps=overlap_steps))
    slot.train()
    return slot


VARIANTS: dict[str, dict[str, Any]] = {
    "blocking": {},
    "overlapped": {"overlap_steps": 7},
    "int4": {"codec": "int4"},
    "int4-fragments-overlapped": {"codec": "int4", "num_fragments": 2, "overlap_steps": 7},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=list(VARIANTS))
def test_killed_between_syncs_it_ends_with_the_same_weights(
    serve: Serve, start_slot: StartSlot, tmp_path: Path, variant: str
) -> None:
    options = VARIANTS[variant]
    wanted = undisturbed(start_slot, serve(tmp_path / "one", quorum=1), **options)
    url = serve(tmp_path / "two", quorum=1)
    slot = begun(start_slot, url, **options)
    for step in (3, 62, 150):
        slot.until_step(step)
        slot.kill()
        before = slot.step()
        restored = slot.restart()
        assert (restored.rung, restored.step, restored.lost) == (Rung.VAULT, before, ""), restored.refused
    assert until_version(url, len(STEPS)) == wanted


Connect = Callable[[str], SynchronizerClient]


def contribute(url: str, connect: Connect, number: int, num_fragments: int) -> None:
    """The other island's part of a round of the run: the same bytes whenever it is made."""
    place = place_of(number, num_fragments)
    client = connect(url).of(place.fragment)
    deadline_s = time.time() + 60
    state = client.state(deadline_s=deadline_s).fragments[place.fragment]
    values = torch.empty(state.num_bytes // 4)
    client.pull(place.version, values, deadline_s=deadline_s)
    generator = torch.Generator().manual_seed(number)
    values.add_(torch.randn(values.shape, generator=generator), alpha=1e-3)
    client.push(values, round=place.version, slot=1, epoch=1, tokens=640, deadline_s=deadline_s)


def until_in(url: str, number: int, num_fragments: int) -> None:
    """Until the slot under test has contributed to that round of the run."""
    place = place_of(number, num_fragments)

    def is_in() -> bool:
        fragments = outer_state(url).fragments
        return bool(fragments) and 0 in fragments[place.fragment].open_round.slots

    wait_until(is_in, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("variant", VARIANTS, ids=list(VARIANTS))
def test_killed_while_its_round_is_open_it_ends_with_the_same_weights(
    serve: Serve, start_slot: StartSlot, connect: Connect, tmp_path: Path, variant: str
) -> None:
    options = {"num_fragments": 1} | VARIANTS[variant]
    # A fragment has its second turn in the third round: what it owes from its first is in that.
    rounds = STEPS if options["num_fragments"] > 1 else STEPS[:2]

    def run(name: str, kills: Callable[[Slot, int], None]) -> list[str]:
        url = serve(tmp_path / name, quorum=2)
        chosen = dict(options)
        overlap_steps = chosen.pop("overlap_steps", None)
        slot = start_slot(url, name=name, **chosen)
        slot.plan(*syncs_at(*rounds, overlap_steps=overlap_steps))
        slot.train()
        for number in range(len(rounds)):
            until_in(url, number, options["num_fragments"])
            kills(slot, number)
            contribute(url, connect, number, options["num_fragments"])
            until_version(url, number + 1)
        return until_version(url, len(rounds))

    def kill_each_time(slot: Slot, number: int) -> None:
        slot.kill()
        restored = slot.restart()
        assert (restored.rung, restored.lost) == (Rung.VAULT, ""), restored.refused

    wanted = run("undisturbed", lambda *_: None)
    assert run("killed", kill_each_time) == wanted


def test_killed_before_it_has_adopted_what_its_round_made(
    serve: Serve, start_slot: StartSlot, connect: Connect, tmp_path: Path
) -> None:
    """The round closes while nobody is there: the next worker finds its contribution in it by pushing it again."""

    def run(name: str, *, kill: bool) -> list[str]:
        url = serve(tmp_path / name, quorum=2)
        slot = start_slot(url, name=name, codec="int4")
        slot.plan(*syncs_at(*STEPS[:2]))
        slot.train()
        for number in range(2):
            until_in(url, number, 1)
            if kill:
                slot.kill()
            contribute(url, connect, number, 1)
            until_version(url, number + 1)
            if kill:
                assert slot.restart().lost == ""
        return until_version(url, 2)

    assert run("killed", kill=True) == run("undisturbed", kill=False)


def test_a_corrupt_newest_generation_gives_way_to_the_one_before(
    serve: Serve, start_slot: StartSlot, tmp_path: Path
) -> None:
    # Late syncs: after a push that the older generation knows nothing of, the same weights are not promised.
    steps = (1500, 1530)
    wanted = undisturbed(start_slot, serve(tmp_path / "one", quorum=1), steps=steps)
    url = serve(tmp_path / "two", quorum=1)
    slot = begun(start_slot, url, steps=steps)
    slot.until_step(20)
    slot.kill()
    newest, before = slot.vault.generations()
    region = slot.vault.region(newest.part("hot").region)
    region[newest.part("hot").length // 2] ^= 1
    restored = slot.restart()
    assert (restored.rung, restored.generation, restored.step) == (Rung.VAULT, before.number, before.step)
    assert any("does not match its digest" in reason for reason in restored.refused)
    assert until_version(url, len(steps)) == wanted


def test_with_nothing_whole_left_the_next_worker_starts_from_the_global_parameters(
    serve: Serve, start_slot: StartSlot, tmp_path: Path
) -> None:
    slot = begun(start_slot, serve(tmp_path / "sync", quorum=1))
    slot.until_step(20)
    slot.kill()
    for generation in slot.vault.generations():
        slot.vault.region(generation.part("hot").region)[99] ^= 1
    restored = slot.restart()
    assert restored.rung is Rung.FRESH
    assert len(restored.refused) == 2
    # And its snapshots take the place of those.
    wait_until(lambda: slot.step() > 10)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "another"}, "run_id"),
        ({"epoch": 0}, "of epoch 1, this is 0"),
    ],
    ids=["another-run", "a-later-epoch"],
)
def test_a_foreign_snapshot_is_refused(
    serve: Serve, start_slot: StartSlot, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    slot = begun(start_slot, url)
    until_version(url, 1)
    slot.until_step(STEPS[0] + 5)
    slot.kill()
    restored = slot.restart(**change)
    assert restored.rung is not Rung.VAULT
    assert any(reason in each for each in restored.refused)


def test_another_model_than_the_snapshots_is_refused(serve: Serve, start_slot: StartSlot, tmp_path: Path) -> None:
    slot = begun(start_slot, serve(tmp_path / "sync", quorum=1))
    slot.until_step(5)
    slot.kill()
    slot.change(synchronizer_url=serve(tmp_path / "other", quorum=1), width=64)
    restored = slot.restart()
    assert restored.rung is Rung.FRESH
    assert any("model" in each for each in restored.refused)


def test_a_run_that_took_a_later_contribution_of_the_slot_makes_an_old_snapshot_start_over(
    serve: Serve, start_slot: StartSlot, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    slot = begun(start_slot, url)
    until_version(url, 1)
    slot.until_step(STEPS[0] + 5)
    slot.kill()
    kept = slot.path.read_bytes()
    slot.restart()
    until_version(url, 2)
    slot.until_step(STEPS[1] + 5)
    slot.kill()
    slot.path.write_bytes(kept)
    restored = slot.restart(is_own=False)
    assert restored.rung is Rung.VAULT
    assert "may be in the run already" in restored.lost
    assert slot.worker.progress(lambda p: p.step > 0).round == 2
