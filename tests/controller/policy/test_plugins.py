"""Policies that another distribution brings along by its metadata."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from controller.policy import make_policy
from controller.policy.base import Policy
from controller.schema import Action, PolicySpec, Reason
from service.errors import InputError
from tests.controller.helpers import Client, ManualClock, make_settings, play
from tests.controller.policy.views import CONTEXT, fleet, island

MODULE = """
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from controller.policy import parse_params
from controller.policy.rule import GuardedPolicy, Opinion
from controller.schema import Reason


class Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    every: int = 3


@dataclass(frozen=True)
class Multiples:
    every: int

    def judge(self, view, group, now_s):
        hit = group.h % self.every == 0
        reason = Reason.FIXED_H_REACHED if hit else Reason.BELOW_FIXED_H
        return Opinion(sync=hit, reason=reason, terms={"every": float(self.every)})


def build(spec, context):
    return GuardedPolicy(spec.name, Multiples(parse_params(Params, spec).every))


def fails(spec, context):
    raise RuntimeError("no luck")


def nothing(spec, context):
    return object()


def renamed(spec, context):
    return GuardedPolicy("another", Multiples(3))
"""
ENTRY_POINTS = """
[wadiloco.policies]
multiples = night_policies:build
fails = night_policies:fails
nothing = night_policies:nothing
renamed = night_policies:renamed
gone = not_there_at_all:build
half = night_policies:missing
exits = exits_at_once:build
wa_diloco = not_there_at_all:build
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution as pip would leave it: a module, and metadata beside it."""
    site = tmp_path / "site"
    info = site / "night_policies-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: night-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "night_policies.py").write_text(MODULE)
    (site / "exits_at_once.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "night_policies", raising=False)
    return site


def make(name: str, **params: float) -> Policy:
    return make_policy(PolicySpec(name=name, params=params), CONTEXT)


def test_it_is_used_like_a_built_in_one(installed: Path) -> None:
    policy = make("multiples", every=4)
    assert (policy.name, policy.syncs) == ("multiples", True)
    decision = policy.decide(fleet(island(52)), 1.0)
    assert (decision.action, decision.reason) == (Action.SYNC, Reason.FIXED_H_REACHED)
    assert decision.terms["every"] == 4.0
    assert policy.decide(fleet(island(8)), 1.0).reason is Reason.BELOW_MIN_H


def test_nothing_is_imported_before_it_is_asked_for(installed: Path) -> None:
    make("wa_forecast")
    assert "night_policies" not in sys.modules
    make("multiples")
    assert "night_policies" in sys.modules


def test_an_unknown_name_is_told_what_there_is(installed: Path) -> None:
    with pytest.raises(InputError) as caught:
        make("multiple")
    assert caught.value.remedy is not None
    assert "wa_forecast" in caught.value.remedy
    assert "multiples" in caught.value.remedy


def test_a_built_in_name_cannot_be_taken(installed: Path) -> None:
    assert type(make("wa_diloco")).__module__ == "controller.policy.rule"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone", "not_there_at_all"),
        ("half", "missing"),
        ("fails", "RuntimeError: no luck"),
        ("exits", "SystemExit: 3"),
        ("nothing", "no name, syncs, decide"),
        ("renamed", "calls itself 'another'"),
    ],
)
def test_a_broken_one_says_what_is_wrong_and_with_which_package(installed: Path, name: str, why: str) -> None:
    with pytest.raises(InputError, match="night-policies") as caught:
        make(name)
    assert why in str(caught.value)
    assert caught.value.field == "name"


def test_its_own_errors_about_parameters_pass_through(installed: Path) -> None:
    with pytest.raises(InputError) as caught:
        make("multiples", evry=1)
    assert caught.value.field == "params.evry"


def test_a_broken_one_leaves_the_controller_with_the_policy_that_it_had(installed: Path, tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        refused = await client.http.put("/v1/policy", json={"name": "gone"})
        assert refused.status_code == 422
        assert "night-policies" in refused.text
        assert (await client.get("/v1/policy"))["name"] == "fixed_h"
        accepted = await client.http.put("/v1/policy", json={"name": "multiples", "params": {"every": 5}})
        assert accepted.status_code == 200
        assert (await client.get("/v1/policy"))["name"] == "multiples"

    play(make_settings(tmp_path), ManualClock(), body)


def test_a_policy_whose_package_was_removed_gives_way_to_that_of_the_settings(installed: Path, tmp_path: Path) -> None:
    async def choose(client: Client) -> None:
        assert (await client.http.put("/v1/policy", json={"name": "multiples"})).status_code == 200

    async def look(client: Client) -> None:
        assert (await client.get("/v1/policy"))["name"] == "fixed_h"

    play(make_settings(tmp_path), ManualClock(), choose)
    (installed / "night_policies-1.0.dist-info" / "entry_points.txt").unlink()
    play(make_settings(tmp_path), ManualClock(), look)
