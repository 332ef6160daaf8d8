"""Reports that cannot be true are refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from controller.nonsense import check_heartbeat
from controller.schema import Heartbeat
from diloco.schema import Progress
from service.errors import InputError
from tests.controller.helpers import START_S, progress, report


def check(last: Progress | None = None, *, version: int = 5, **fields: Any) -> None:
    beat = Heartbeat(instance="i", epoch=1, t_s=START_S, **fields)
    check_heartbeat(beat, last, version=version, now_s=START_S + 10)


def test_ordinary_reports_pass() -> None:
    check(progress(5), progress=progress(6, step=1001), syncs=[report(5)])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"progress": progress(step=10**13)}, "progress.step"),
        ({"progress": progress(tokens=10**18 + 1)}, "progress.tokens"),
        ({"progress": progress(loss=1e300)}, "progress.loss"),
        ({"progress": progress(loss_at_sync=-1e9)}, "progress.loss_at_sync"),
        ({"progress": progress(round=20_000)}, "progress.round"),
        ({"syncs": [report(5), report(10**10)]}, "syncs.1.round"),
        ({"syncs": [report(finished_s=START_S - 1)]}, "syncs.0.finished_s"),
        ({"syncs": [report(finished_s=START_S + 1e6)]}, "syncs.0.finished_s"),
        ({"syncs": [report(inner_steps=10**15)]}, "syncs.0.inner_steps"),
        ({"syncs": [report(bytes_pushed=10**18 + 1)]}, "syncs.0.bytes_pushed"),
    ],
)
def test_nonsense_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        check(**fields)
    assert caught.value.field == field


def test_steps_go_back_only_with_a_restart() -> None:
    with pytest.raises(InputError, match="without a restart"):
        check(progress(step=1000), progress=progress(step=999))
    check(progress(step=1000), progress=progress(step=900, restarts=1))
    with pytest.raises(InputError) as caught:
        check(progress(restarts=2), progress=progress(restarts=1))
    assert caught.value.field == "progress.restarts"


def test_a_controller_that_knows_nothing_believes_the_first_round() -> None:
    check(version=0, progress=progress(round=50_000))
