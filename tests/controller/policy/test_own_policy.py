"""The example of the manual is installed as it stands there, and does what is said of it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from controller.policy import make_policy
from controller.policy.base import Group, ServerView, ask
from controller.policy.plugins import GROUP
from controller.policy.rule import GuardedPolicy, Opinion
from controller.schema import Action, PolicySpec, Reason
from service.errors import InputError
from tests.controller.policy.views import CONTEXT, fleet

MANUAL = Path(__file__).parents[3] / "docs" / "policies.md"
BLOCK = re.compile(r"^```(toml|python)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DAY_S, HOUR_S = 86400.0, 3600.0


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: text for _, name, text in BLOCK.findall(MANUAL.read_text())}
    project: dict[str, Any] = tomllib.loads(files.pop("pyproject.toml"))["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(f"{name} = {where}\n" for name, where in project["entry-points"][GROUP].items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("hour", "pressure", "action"),
    [
        (23.5, 0.9, Action.SYNC),
        (3.0, None, Action.SYNC),
        (6.0, 0.9, Action.DEFER),
        (12.0, 0.01, Action.SYNC),
        (12.0, None, Action.DEFER),
        (22.5, 0.9, Action.DEFER),
    ],
)
def test_the_example_of_the_manual_works(hour: float, pressure: float | None, action: Action) -> None:
    policy = make_policy(PolicySpec(name="at_night", params={"from_h": 23}), CONTEXT)
    view = fleet(servers=(ServerView(server_id="s", node="n", pressure_frac=pressure),))
    decision = ask(policy, view, 20_000 * DAY_S + hour * HOUR_S)
    assert decision.action is action
    assert decision.terms["hour"] == pytest.approx(hour)


@pytest.mark.usefixtures("example")
def test_its_parameters_are_checked_and_the_guard_stands_before_it() -> None:
    with pytest.raises(InputError) as caught:
        make_policy(PolicySpec(name="at_night", params={"from_h": 25}), CONTEXT)
    assert caught.value.field == "params.from_h"
    policy = make_policy(PolicySpec(name="at_night"), CONTEXT)
    assert ask(policy, fleet(paused=True), 0.0).reason is Reason.PAUSED


def test_the_manual_names_fields_and_reasons_that_there_are() -> None:
    section = MANUAL.read_text().partition("## A policy of your own")[2]
    for name in re.findall(r"`([A-Z]+_[A-Z_]+)`", section):
        assert name in Reason.__members__
    table = section.partition("**`group`**")[2].partition("**`view`**")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(Group.__dataclass_fields__)


class Vague:
    """Answers with a reason of its own."""

    def judge(self, view: object, group: object, now_s: float) -> Opinion:
        return Opinion(sync=True, reason="a hunch", terms={})  # type: ignore[arg-type]


def test_a_reason_that_is_none_is_the_failure_of_the_policy() -> None:
    with pytest.raises(TypeError, match="'a hunch'"):
        ask(GuardedPolicy("vague", Vague()), fleet(), 1.0)
