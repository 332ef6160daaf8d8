"""Plans: drawn the same from the same seed, or written down."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from replay.chaos.config import ChaosSettings
from replay.chaos.faults import HELD, OF_SLOT, POSSIBLE, Fault, FaultKind, Role, Shape, draw_plan, in_order, parse_fault
from replay.chaos.main import one_fault_each
from service.errors import ConfigError, InputError
from service.settings import load_settings

SHAPE = Shape(num_slots=3, num_ranks=2)


def drawn(seed: int = 0, **changes: Any) -> list[Fault]:
    given: dict[str, Any] = {
        "kinds": list(FaultKind),
        "roles": list(Role),
        "every_s": 10.0,
        "hold_s": 4.0,
        "count": 200,
    }
    return draw_plan(seed, SHAPE, **{**given, **changes})


def test_the_same_seed_gives_the_same_plan_whatever_was_drawn_elsewhere() -> None:
    first = drawn(7)
    random.seed(1)
    assert drawn(7) == first
    assert drawn(8) != first


def test_a_drawn_plan_hits_only_what_there_is_and_all_of_it() -> None:
    plan = drawn()
    assert len(plan) == 200
    for fault in plan:
        assert fault.kind in POSSIBLE[fault.role]
        assert (fault.slot is not None) == (fault.role in OF_SLOT)
        assert (fault.rank is not None) == (fault.role is Role.WORKER)
        assert fault.hold_s == (4.0 if fault.kind in HELD else 0.0)
    assert {fault.kind for fault in plan} == set(FaultKind)
    assert {fault.role for fault in plan} == set(Role)
    assert {fault.slot for fault in plan} == {None, 0, 1, 2}
    assert {fault.rank for fault in plan} == {None, 0, 1}
    assert len({fault.seed for fault in plan}) == 200


def test_gaps_are_half_to_one_and_a_half_of_the_mean() -> None:
    times_s = [0.0, *(fault.at_s or 0.0 for fault in drawn())]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert min(gaps) >= 5.0
    assert max(gaps) <= 15.0
    assert 9.0 < sum(gaps) / len(gaps) < 11.0


def test_a_duration_ends_the_plan_and_so_does_a_count() -> None:
    within = drawn(count=None, duration_s=100.0)
    assert 6 <= len(within) <= 20
    assert all((fault.at_s or 0.0) <= 100.0 for fault in within)
    assert drawn(count=3, duration_s=1000.0) == drawn(count=200)[:3]


def test_kinds_that_hit_none_of_the_targets_are_refused() -> None:
    with pytest.raises(InputError, match="partition cannot hit worker") as caught:
        drawn(kinds=[FaultKind.PARTITION], roles=[Role.WORKER])
    assert caught.value.field == "kinds"


@pytest.mark.parametrize("text", ["slot=1,step=40,kind=kill,target=worker", "slot=1:step=40", " slot = 1 , step = 40 "])
def test_a_fault_at_a_step_is_read(text: str) -> None:
    fault = parse_fault(text, SHAPE, hold_s=5.0)
    assert fault == Fault(kind=FaultKind.KILL, role=Role.WORKER, slot=1, rank=0, at_step=40)
    assert fault.target == "worker 1/0"


def test_a_fault_at_a_time_that_lasts_is_read() -> None:
    fault = parse_fault("time_s=2.5,kind=stop,target=synchronizer,hold_s=9", SHAPE, hold_s=5.0)
    assert (fault.at_s, fault.hold_s, fault.slot, fault.target) == (2.5, 9.0, None, "synchronizer")
    assert parse_fault("time_s=1,kind=stop,target=agent,slot=0", SHAPE, hold_s=5.0).hold_s == 5.0
    assert parse_fault("time_s=1,slot=2,rank=1", SHAPE, hold_s=5.0).target == "worker 2/1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slot=1,step=4,kind=burn", "'burn' is not one of"),
        ("slot=1,step=4,target=sidecar", "'sidecar' is not one of"),
        ("slot=3,step=4", "slot 3 is over the last, 2"),
        ("slot=1,rank=2,step=4", "rank 2 is over the last, 1"),
        ("slot=1", "give one of step and time_s"),
        ("slot=1,step=4,time_s=2", "give one of step and time_s"),
        ("step=4", "give the slot"),
        ("time_s=4,target=agent", "give the slot"),
        ("slot=1,step=4,colour=red", "colour is no part"),
        ("slot=one,step=4", "slot 'one' is no whole number"),
        ("slot=1,time_s=soon", "time_s 'soon' is no number"),
        ("slot=1,time_s=nan", "time_s 'nan' is no number"),
        ("slot=1,step=4,rank=0,target=agent", "only workers have ranks"),
        ("slot=1,step=4,kind=partition", "partition cannot hit a worker"),
    ],
)
def test_what_is_no_fault_is_named(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        parse_fault(text, SHAPE, hold_s=5.0)
    assert (caught.value.field, bool(caught.value.remedy)) == ("at", True)


def test_faults_at_times_come_in_order_and_before_those_at_steps() -> None:
    late, early = (parse_fault(f"time_s={t},slot=0", SHAPE, hold_s=1) for t in (9, 2))
    far, near = (parse_fault(f"step={step},slot=0", SHAPE, hold_s=1) for step in (50, 10))
    assert in_order([far, late, near, early]) == [early, late, near, far]


# Settings.


def settings_of(*argv: str) -> ChaosSettings:
    return load_settings(ChaosSettings, one_fault_each(argv))


def test_several_faults_on_the_command_line_stay_apart() -> None:
    argv = ("--at", "slot=1,step=40,kind=kill", "--at=time_s=3,kind=stop,target=controller", "--kinds", "kill,stop")
    settings = settings_of(*argv)
    plan = settings.plan(Shape(num_slots=2, num_ranks=1))
    assert [(fault.kind, fault.target, fault.at_s, fault.at_step) for fault in plan] == [
        ("stop", "controller", 3.0, None),
        ("kill", "worker 1/0", None, 40),
    ]
    assert settings.kinds == ("kill", "stop")


def test_settings_draw_the_same_plan_again_and_add_what_is_planned() -> None:
    shape = Shape(num_slots=2, num_ranks=1)
    assert len(settings_of().plan(shape)) == 5
    assert settings_of("--seed", "3").plan(shape) == settings_of("--seed", "3").plan(shape)
    both = settings_of("--count", "2", "--at", "slot=0,step=5").plan(shape)
    assert sum(fault.at_step is not None for fault in both) == 1
    assert len(both) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--kinds", "kill,burn"), "'burn' is not one of"),
        (("--targets", "sidecar"), "'sidecar' is not one of"),
        (("--kinds", "partition"), "partition cannot hit worker"),
        (("--at", "slot=2,step=4"), "slot 2 is over the last, 1"),
        (("--ports", "20-10"), "is not a range"),
        (("--corrupt-files", "sidecar=*"), "'sidecar' is not one of"),
    ],
)
def test_settings_that_cannot_work_are_refused(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(*argv)


def test_a_given_fleet_may_have_more_slots_than_are_started_here(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text("{}")
    settings = settings_of("--fleet", str(tmp_path / "fleet.json"), "--at", "slot=7,step=4")
    assert settings.plan(Shape(num_slots=8, num_ranks=1))[0].slot == 7
