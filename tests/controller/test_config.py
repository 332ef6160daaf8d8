"""Settings that contradict each other are refused with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from controller.config import ControllerSettings
from service.errors import ConfigError
from service.settings import load_settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min-h", "600"], ["min_h 600 is over max_h 512", "lower min_h or raise max_h"]),
        (
            ["--budget-syncs", "8", "--budget-horizon-s", "60", "--min-gap-s", "20"],
            ["140 s", "lengthen budget_horizon_s"],
        ),
        (
            ["--budget-horizon-s", "60"],
            ["budget_syncs: a horizon", "set budget_syncs too, or leave budget_horizon_s out"],
        ),
        (["--policy", "magic"], ["no such policy: magic", "wa_diloco"]),
        (["--policy", "fixed_h", "--policy-params", "h=5"], ["policy_params.h", "from min_h to max_h"]),
        (["--budget-syncs", "3", "--budget-syncs-per-hour", "3"], ["either the rate, or budget_syncs with"]),
        (["--policy-params", "h:3"], ["policy_params: is not NAME=VALUE", "write --policy-params NAME=VALUE"]),
        (["--policy-params", "{h}"], ["policy_params: is not NAME=VALUE", "write --policy-params NAME=VALUE"]),
        (["--policy-params", "h=x"], ["policy_params.h: ", "got 'x'", "set --policy-params"]),
        (["--shadow-policies", "fixed_h:x=3"], ["shadow_policies: params.x: no such parameter"]),
        (["--shadow-policies", "fixed_h:x"], ["shadow_policies: 'x' of 'fixed_h:x' is not PARAM=VALUE"]),
        (["--policy-params", "w_lots=5"], ["policy_params.w_lots", "w_loss"]),
        (["--stale-after-s", "0.2"], ["stale_after_s", "raise it"]),
        (["--lease-timeout-s", "0.5", "--tick-s", "2"], ["tick_s"]),
        (["--num-slots", "0"], ["num_slots"]),
        (["--host", "0.0.0.0"], ["token"]),  # noqa: S104
    ],
)
def test_contradictions_are_refused(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(ControllerSettings, arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("given", ['{"h": 200}', "h=200"])
def test_policy_parameters_come_from_the_command_line(given: str) -> None:
    settings = load_settings(ControllerSettings, ["--policy", "fixed_h", "--policy-params", given])
    assert settings.policy_spec.params == {"h": 200}


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WADILOCO_CONTROLLER_POLICY_PARAMS", '{"threshold": 0.25}')
    assert load_settings(ControllerSettings, []).policy_params == {"threshold": 0.25}


def test_timeouts_follow_from_the_lease() -> None:
    values: dict[str, Any] = {"lease_timeout_s": 20.0}
    settings = ControllerSettings(**values)
    assert (settings.heartbeat_interval_s, settings.takeover_after_s) == (2.0, 6.0)


def test_a_thousand_islands_ten_thousand_sidecars_and_the_curious_have_room() -> None:
    assert ControllerSettings().connection_limit == 12_288 + 2 * 4
    assert ControllerSettings(num_slots=1000).connection_limit >= 10_000 + 2 * 1000 + 1000
    assert ControllerSettings(max_connections=100, num_slots=1000).connection_limit == 100
