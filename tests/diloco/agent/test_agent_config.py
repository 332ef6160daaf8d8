from __future__ import annotations

import pytest

from diloco.agent.config import IslandSettings
from service.errors import ConfigError
from service.settings import load_settings

ALONE = ["--slot", "0", "--synchronizer", "http://127.0.0.1:9600"]


def test_a_controller_is_all_that_is_needed() -> None:
    settings = load_settings(IslandSettings, ["--controller", "http://127.0.0.1:9500"])
    assert settings.identity == settings.node
    assert settings.port == 9700


def test_slot_and_synchronizer_do_without_a_controller() -> None:
    assert load_settings(IslandSettings, ALONE).slot == 0


def test_lists_are_given_by_repetition() -> None:
    settings = load_settings(IslandSettings, [*ALONE, "--data", "a.txt", "--data", "b", "--cores", "0", "--cores", "1"])
    assert [str(path) for path in settings.data] == ["a.txt", "b"]
    assert settings.cores == (0, 1)


def test_priorities_are_written_in_lower_case() -> None:
    assert load_settings(IslandSettings, [*ALONE, "--sync-priority", "idle"]).sync_priority == "idle"


def test_contributions_are_fp32_unless_another_codec_is_given() -> None:
    assert load_settings(IslandSettings, ALONE).codec == "fp32"
    assert load_settings(IslandSettings, [*ALONE, "--codec", "int4"]).codec == "int4"


def test_only_the_built_in_workload_shares_out_its_batch() -> None:
    assert load_settings(IslandSettings, [*ALONE, "--ranks", "3", "--workload", "mine:make"]).ranks == 3
    assert load_settings(IslandSettings, [*ALONE, "--ranks", "2", "--shard-optimizer"]).shard_optimizer


@pytest.mark.parametrize(
    "options",
    [["--workload-options", "width=64,depth=2"], ["--workload-options", "width=64", "--workload-options", "depth=2"]],
)
def test_options_of_an_own_workload_are_text(options: list[str]) -> None:
    settings = load_settings(IslandSettings, [*ALONE, "--workload", "pack.mine:make", *options])
    assert settings.workload == "pack.mine:make"
    assert settings.workload_options == {"width": "64", "depth": "2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "controller is not set"),
        (["--slot", "0"], "controller is not set"),
        (["--controller", "localhost:9500"], "controller"),
        ([*ALONE, "--width", "30"], "width 30 must be a multiple"),
        ([*ALONE, "--data-shards", "0"], "data_shards"),
        (["--slot", "16", "--synchronizer", "http://x"], "slot 16 has no shard"),
        ([*ALONE, "--lr", "nan"], "lr"),
        ([*ALONE, "--sync-priority", "urgent"], "sync_priority"),
        ([*ALONE, "--codec", "int3"], "codec"),
        ([*ALONE, "--cores", "-1"], "cores"),
        ([*ALONE, "--workload", "mine"], "workload"),
        ([*ALONE, "--workload", "my-model:make"], "workload"),
        ([*ALONE, "--workload", "mine:make", "--width", "64"], "width is an option of the built-in workload"),
        ([*ALONE, "--workload", "mine:make", "--data", "a.txt"], "data is an option of the built-in workload"),
        ([*ALONE, "--workload-options", "a=1"], "workload_options need a workload"),
        ([*ALONE, "--lr-schedule", "step"], "lr_schedule"),
        ([*ALONE, "--lr-schedule", "cosine"], "lr_schedule cosine needs decay_steps"),
        ([*ALONE, "--decay-steps", "100"], "decay_steps is for a schedule that decays"),
        ([*ALONE, "--min-lr", "0.0001"], "min_lr is for a schedule that decays"),
        ([*ALONE, "--lr-schedule", "linear", "--decay-steps", "50"], "decay_steps 50 must be above warmup_steps 50"),
        (
            [*ALONE, "--lr-schedule", "linear", "--decay-steps", "60", "--min-lr", "0.01"],
            "min_lr 0.01 must not be above lr 0.001",
        ),
        ([*ALONE, "--precision", "fp16"], "precision: fp16 needs loss scaling.*give bf16"),
        ([*ALONE, "--precision", "fp8"], "precision"),
        ([*ALONE, "--accumulation-steps", "0"], "accumulation_steps"),
        ([*ALONE, "--hf-model", "llama", "--workload", "mine:make"], "workload and hf_model are two models"),
        ([*ALONE, "--hf-model", "llama", "--width", "64"], "width is that of hf_model's config.json"),
        ([*ALONE, "--dry-run-steps", "3"], "dry_run_steps is for a dry run: give --dry-run"),
        ([*ALONE, "--json"], "as_json is for a dry run"),
        (["--dry-run", "--bandwidth", "1gbps"], "bandwidth: '1gbps' is no bandwidth: write 1Gbit/s"),
        ([*ALONE, "--ranks", "0"], "ranks"),
        ([*ALONE, "--ranks", "3"], "batch_size 4 must be a multiple of ranks 3"),
        ([*ALONE, "--shard-optimizer"], "shard_optimizer needs several ranks"),
        ([*ALONE, "--group-timeout-s", "0"], "group_timeout_s"),
        ([*ALONE, "--restart-backoff-s", "60", "--restart-backoff-max-s", "1"], "restart_backoff_max_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(IslandSettings, arguments)


def test_several_controllers_are_given_with_commas() -> None:
    settings = load_settings(IslandSettings, ["--controller", "http://a:9500,https://b/"])
    assert settings.controllers == ("http://a:9500", "https://b")


@pytest.mark.parametrize("text", ["http://a:9500,", "http://a:9500,b", "http://a:9500 http://b:9500", ","])
def test_a_list_of_controllers_with_something_else_in_it_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="controller"):
        load_settings(IslandSettings, ["--controller", text])
