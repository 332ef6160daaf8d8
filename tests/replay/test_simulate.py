"""Policies on a virtual clock: the whole command on the bundled trace."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

import wadiloco
from replay.config import POLICIES as REPLAYED
from replay.config import ReplaySettings
from replay.simulate import oracle_schedule, simulate, stretches
from replay.simulate_config import ORACLE, SimulateSettings
from replay.summary import Run, Summary, read_json
from replay.traces import Request, Trace, read_trace
from service.errors import ConfigError, InputError
from service.settings import load_settings

SIMULATED = (*REPLAYED, ORACLE)
POLICIES = ",".join(SIMULATED)
OPTIONS = ("--seeds", "2", "--draws", "3", "--duration-s", "100", "--warm-up-s", "120")


def settings(*options: str, policies: str = POLICIES) -> SimulateSettings:
    return load_settings(SimulateSettings, [*OPTIONS, "--policies", policies, *options])


@pytest.fixture(scope="module")
def summary() -> Summary:
    return simulate(settings())


def by_policy(runs: list[Run]) -> dict[str, list[Run]]:
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.policy].append(run)
    return found


def test_every_policy_runs_on_every_seed(summary: Summary) -> None:
    runs = by_policy(summary.runs)
    assert {name: len(found) for name, found in runs.items()} == {
        name: 6 if name == "random_deferral" else 2 for name in SIMULATED
    }
    assert all(run.mode == "sim" for run in summary.runs)
    assert len({run.requests for run in summary.runs if run.seed == 0}) == 1


def test_budgets_are_spent_exactly(summary: Summary) -> None:
    for run in summary.runs:
        assert run.outer_syncs == (0 if run.policy == "no_sync" else 6), run.policy


def test_nothing_does_better_than_the_oracle_and_no_sync_at_all(summary: Summary) -> None:
    runs = by_policy(summary.runs)
    for seed in (0, 1):
        (oracle,) = (run for run in runs["oracle"] if run.seed == seed)
        (none,) = (run for run in runs["no_sync"] if run.seed == seed)
        others = [run for run in summary.runs if run.seed == seed and run.policy not in {"oracle", "no_sync"}]
        assert none.violations <= oracle.violations <= min(run.violations for run in others)
        assert none.tokens_trained > oracle.tokens_trained


def test_the_summary_says_what_share_of_the_gap_was_closed(summary: Summary) -> None:
    assert summary.gap_closed["wa_forecast"] is not None
    assert {found.b for found in summary.comparisons} == {"no_sync", "random_deferral"}


def test_the_same_settings_give_the_same_runs(summary: Summary) -> None:
    assert simulate(settings()).runs == summary.runs


def test_requests_of_all_servers_are_judged_together() -> None:
    two = simulate(settings("--servers", "2", policies="no_sync,wa_forecast"))
    one = simulate(settings(policies="no_sync,wa_forecast"))
    assert [run.requests for run in two.runs] == [run.requests for run in one.runs]
    assert two.runs[0].inner_steps == 2 * one.runs[0].inner_steps


def test_the_sidecars_learn_in_the_warm_up_what_a_sync_does() -> None:
    chosen = settings()
    first = next(iter(stretches(read_trace(chosen.trace), chosen)))
    known = [moment.costs.expected_per_s for moment in first.moments if moment.costs is not None]
    assert len(known) == 100
    # Bursts of 10/s between lulls, of which most requests would violate.
    assert max(known) > 2.0
    assert min(known) < 0.2


def test_the_oracle_waits_for_the_only_lull() -> None:
    busy = [Request(number / 5, 10, 20) for number in range(500) if not 200 <= number < 225]
    trace = Trace("lull", "made", tuple(busy), 100.0)
    chosen = settings("--seeds", "1", "--outer-syncs", "1", "--warm-up-s", "0")
    (only,) = stretches(trace, chosen)
    ((start_s, end_s),) = oracle_schedule(only, chosen).windows
    assert 40.0 <= start_s < end_s <= 45.0


def test_the_command_writes_summary_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    few = ("--policies", "random_deferral,wa_forecast,oracle", "--seeds", "1", "--draws", "2")
    assert (
        wadiloco.main(["simulate", *few, "--warm-up-s", "60", "--duration-s", "60", "--out", str(out), "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert read_json(out / "summary.json") == Summary.model_validate(printed)
    assert "wa_forecast" in (out / "report.md").read_text()


def test_the_results_of_a_live_replay_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert wadiloco.main(["simulate", "--out", str(tmp_path)]) == 4
    assert not (tmp_path / "summary.json").exists()


def test_a_live_replay_takes_the_same_policies() -> None:
    policies = tuple(name for name in SIMULATED if name != "oracle")
    assert ReplaySettings(policies=policies).policies == policies
    with pytest.raises(ValueError, match="oracle"):
        ReplaySettings(policies=("oracle",))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policies", "magic"), "magic"),
        (("--policies", "oracle"), "twice"),
        (("--outer-syncs", "60"), "do not fit"),
        (("--min-h", "9", "--max-h", "8"), "above max_h"),
        (("--policy-params", "oracle.x=1"), "POLICY.PARAM"),
        (("--slo", "e2e"), "metric:threshold"),
    ],
)
def test_what_cannot_work_is_refused(options: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(*options)


def test_a_parameter_that_a_policy_does_not_have_is_refused_before_the_work() -> None:
    with pytest.raises(InputError, match="no such parameter"):
        simulate(settings("--policy-params", "wa_forecast.magic=1"))


def test_a_seed_past_the_end_of_the_trace_is_refused() -> None:
    with pytest.raises(InputError, match="outside the trace"):
        simulate(settings("--seeds", "9"))
