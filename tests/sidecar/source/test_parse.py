"""Pages of real servers are read whole; what is renamed, missing or broken never reads as zero."""

from __future__ import annotations

import math
import re
from dataclasses import fields

import pytest

from sidecar.source.page import PageError
from sidecar.source.parse import PageParser
from sidecar.source.signals import ALIASES, HISTOGRAM_ALIASES
from sidecar.source.snapshot import EngineSnapshot
from tests.sidecar.helpers import TEXT, capture, edited, parse, without

TTFT_EDGES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIELD_OF_SIGNAL = {
    "kv_usage": ("kv_usage_mean_frac", "kv_usage_max_frac"),
    "sleep_state": ("asleep",),
    "created": ("created_s",),
    "kv_capacity": ("kv_capacity_tokens",),
    # Its name begins the name of the other.
    "waiting": ("waiting", "waiting_capacity"),
}


def test_a_busy_page_is_read() -> None:
    page = parse(capture("busy"))
    assert (page.running, page.waiting, page.asleep, page.num_engines) == (2, 0, False, 1)
    assert page.kv_usage_max_frac == page.kv_usage_mean_frac == pytest.approx(0.0019540791402051783)
    assert (page.steps, page.finished, page.prompt_tokens, page.generation_tokens) == (2175, 90, 21121, 5824)
    assert (page.preemptions, page.rejections) == (0, 0)
    assert page.process_start_s == pytest.approx(1.7960231015e9)
    assert page.created_s == pytest.approx(1.796023120436063e9)


def test_histograms_keep_the_edges_of_the_page() -> None:
    page = parse(capture("busy"))
    assert page.ttft is not None
    assert page.itl is not None
    assert page.e2e is not None
    assert page.ttft.edges[: len(TTFT_EDGES)] == TTFT_EDGES
    assert page.ttft.edges[-1] == math.inf
    assert (page.ttft.count, page.itl.count, page.e2e.count) == (92, 5732, 90)


def test_every_signal_of_a_real_page_is_matched_by_its_newest_name() -> None:
    names = {**ALIASES, **HISTOGRAM_ALIASES}
    for name in ("idle", "busy", "dp2"):
        assert parse(capture(name)).signals == {signal: f"vllm:{aliases[0]}" for signal, aliases in names.items()}


def test_an_idle_server_says_zero() -> None:
    page = parse(capture("idle"))
    assert (page.running, page.waiting, page.finished, page.kv_usage_max_frac) == (0, 0, 0, 0)


def test_engines_of_one_page_are_summed_and_their_kv_usage_is_not() -> None:
    text = capture("dp2").replace(
        'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.0',
        'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5',
    )
    page = parse(edited(text, {"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 1}))
    assert (page.num_engines, page.running, page.waiting) == (2, 6, 2)
    assert (page.kv_usage_mean_frac, page.kv_usage_max_frac) == (0.25, 0.5)
    assert page.ttft is not None
    assert (page.ttft.count, page.generation_tokens) == (1, 6)


def test_a_gauge_that_one_engine_lacks_is_unknown() -> None:
    page = parse(without(capture("dp2"), 'vllm:num_requests_running{engine="1"'))
    assert page.running is None
    assert page.waiting == 0


@pytest.mark.parametrize("signal", [*ALIASES, *HISTOGRAM_ALIASES])
@pytest.mark.parametrize("change", ["missing", "renamed"])
def test_a_missing_or_renamed_series_is_none_and_never_zero(signal: str, change: str) -> None:
    series = "vllm:" + {**ALIASES, **HISTOGRAM_ALIASES}[signal][0]
    text = capture("busy")
    text = without(text, series) if change == "missing" else text.replace(series, series + "_v2")
    page = parse(text)
    lost = FIELD_OF_SIGNAL.get(signal, (signal,))
    assert page.signals[signal] is None
    assert all(getattr(page, name) is None for name in lost)
    others = {f.name for f in fields(EngineSnapshot)} - set(lost) - {"signals", "judged", "missing"}
    assert not [name for name in others if getattr(page, name) is None]


@pytest.mark.parametrize(
    ("old", "new", "signal"),
    [
        ("gpu_cache_usage_perc", "kv_cache_usage_perc", "kv_usage"),
        ("time_per_output_token_seconds", "inter_token_latency_seconds", "itl"),
    ],
)
def test_a_former_name_is_read_and_reported(old: str, new: str, signal: str) -> None:
    page = parse(capture("busy").replace(f"vllm:{new}", f"vllm:{old}"))
    reference = parse(capture("busy"))
    assert page.signals[signal] == f"vllm:{old}"
    assert (page.kv_usage_max_frac, page.itl) == (reference.kv_usage_max_frac, reference.itl)


def test_time_per_output_token_of_whole_requests_is_not_inter_token_latency() -> None:
    text = without(capture("busy"), "vllm:inter_token_latency_seconds")
    assert "vllm:request_time_per_output_token_seconds_count" in text
    assert parse(text).itl is None


def test_a_deprecated_name_beside_the_new_one_is_not_added() -> None:
    text = capture("busy")
    both = text + text.replace("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
    page = parse(both)
    assert page.itl is not None
    assert page.signals["itl"] == "vllm:inter_token_latency_seconds"


def test_a_page_without_engine_labels_is_one_engine() -> None:
    page = parse(capture("busy").replace('engine="0",', ""))
    assert (page.num_engines, page.running) == (1, 2)


def test_ray_renames_the_prefix() -> None:
    page = parse(capture("busy").replace("vllm:", "ray_vllm_"), prefix="ray_vllm_")
    assert page.running == 2
    assert page.signals["running"] == "ray_vllm_num_requests_running"


def test_an_idle_page_in_multiprocess_mode_has_no_gauges_and_still_says_zero() -> None:
    text = capture("multiprocess-idle")
    assert "vllm:num_requests_running{" not in text
    assert "_created{" not in text
    page = parse(text)
    assert (page.running, page.waiting, page.kv_usage_max_frac, page.steps) == (0, 0, 0, 0)
    assert (page.process_start_s, page.created_s, page.missing) == (None, None, ())
    assert page.signals["running"] is None


def test_a_busy_page_in_multiprocess_mode_is_read() -> None:
    page = parse(capture("multiprocess-busy"))
    assert (page.running, page.waiting, page.steps, page.generation_tokens) == (3, 0, 179, 504)
    assert (page.kv_capacity_tokens, page.waiting_capacity, page.asleep, page.missing) == (262144, 0, False, ())


@pytest.mark.parametrize("signal", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])
def test_a_gauge_that_disappears_after_the_first_step_is_missing(signal: str) -> None:
    page = parse(without(capture("multiprocess-busy"), f"vllm:{signal}"))
    assert len(page.missing) == 1
    assert None in (page.running, page.waiting, page.kv_usage_max_frac)


def test_in_multiprocess_mode_the_gauges_of_an_engine_that_took_a_step_are_not_made_up() -> None:
    text = without(capture("dp2"), "process_start_time_seconds")
    one_unset = without(text, 'vllm:num_requests_running{engine="1"')
    assert parse(edited(one_unset, {"vllm:num_requests_running": 3})).running == 3
    assert parse(without(text, 'vllm:num_requests_running{engine="0"')).running is None


def test_a_page_of_a_fresh_single_process_without_gauges_is_missing_them() -> None:
    page = parse(without(capture("idle"), "vllm:num_requests_running"))
    assert (page.running, page.missing) == (None, ("running",))


def ray_page(*replicas: str) -> str:
    text = capture("busy").replace("vllm:", "ray_vllm_")
    return "".join(text.replace('engine="0"', f'engine="0",ReplicaId="{replica}"') for replica in replicas)


def test_replicas_of_one_ray_page_add_up() -> None:
    page = parse(ray_page("a", "b"), prefix="ray_vllm_")
    assert (page.running, page.num_engines, page.kv_usage_max_frac) == (4, 2, page.kv_usage_mean_frac)


def test_one_replica_of_a_ray_page_can_be_chosen() -> None:
    text = ray_page("a") + edited(ray_page("b"), {"ray_vllm_num_requests_running": 7})
    page = PageParser("ray_vllm_", replica="b").parse(text, content_type=TEXT, t_s=0, monotonic_s=0)
    assert page is not None
    assert (page.running, page.num_engines) == (7, 1)
    assert PageParser("ray_vllm_", replica="c").parse(text, content_type=TEXT, t_s=0, monotonic_s=0) is None


@pytest.mark.parametrize(
    ("text", "prefix", "replica", "advice"),
    [
        (ray_page("a"), "vllm:", None, "set --metric-prefix ray_vllm_"),
        (capture("idle"), "ray_vllm_", None, "set --metric-prefix vllm:"),
        (ray_page("a"), "ray_vllm_", "z", "of the replica z"),
        ("process_start_time_seconds 1.0\n", "vllm:", None, "--disable-log-stats"),
    ],
)
def test_a_page_without_series_comes_with_advice(text: str, prefix: str, replica: str | None, advice: str) -> None:
    reader = PageParser(prefix, replica=replica).reader(TEXT)
    reader.feed(text.encode())
    assert reader.finish(t_s=0, monotonic_s=0) is None
    assert advice in "; ".join(reader.lack)


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ('kv_cache_size_tokens="1000",num_gpu_blocks="10",block_size="16"', 1000),
        ('num_gpu_blocks="10",block_size="16"', 160),
        ('num_gpu_blocks="None",block_size="16"', None),
        ('kv_cache_size_tokens="nan"', None),
    ],
)
def test_the_capacity_is_read_from_the_labels(labels: str, tokens: float | None) -> None:
    text = without(capture("busy"), "vllm:cache_config_info") + f"vllm:cache_config_info{{{labels}}} 1.0\n"
    assert parse(text).kv_capacity_tokens == tokens


def test_requests_that_wait_for_room_are_told_from_those_that_are_deferred() -> None:
    text = capture("busy")
    for reason, count in (("capacity", 5), ("deferred", 3)):
        text = text.replace(f'reason="{reason}"}} 0.0', f'reason="{reason}"}} {count}')
    page = parse(edited(text, {"vllm:num_requests_waiting": 8}))
    assert (page.waiting, page.waiting_capacity) == (8, 5)


@pytest.mark.parametrize(
    "line",
    ['x_bucket{le="+Inf"} 1', 'x_bucket{le="1.0"} 2\nx_bucket{le="+Inf"} 1', 'x_bucket{le="+Inf"} 1e300', ""],
)
def test_buckets_that_do_not_fit_together_are_unknown(line: str) -> None:
    base = without(capture("dp2"), "vllm:e2e_request_latency_seconds_bucket")
    text = base + (line + "\n").replace("x_bucket{", 'vllm:e2e_request_latency_seconds_bucket{engine="0",')
    if line.startswith('x_bucket{le="+Inf"} 1') and "e300" not in line:
        text += 'vllm:e2e_request_latency_seconds_bucket{engine="1",le="+Inf"} 1\n'
        text += 'vllm:e2e_request_latency_seconds_bucket{engine="1",le="1.0"} 1\n'
    assert parse(text).e2e is None


@pytest.mark.parametrize("signal", ["prompt_tokens_total", "num_requests_running"])
@pytest.mark.parametrize("value", ["1e17", "1e308", "-1", "NaN", "-Inf"])
def test_what_no_server_counts_is_unknown(signal: str, value: str) -> None:
    page = parse(re.sub(rf"(vllm:{signal}{{.*}}) \S+", rf"\1 {value}", capture("busy")))
    assert None in (page.prompt_tokens, page.running)


def test_a_text_page_that_ends_within_a_line_was_cut_off() -> None:
    with pytest.raises(PageError, match="cut off"):
        parse(capture("busy").rstrip("\n"))


@pytest.mark.parametrize("separator", ["\t", "  ", " \t "])
def test_blanks_of_any_kind_separate_a_value(separator: str) -> None:
    text = re.sub(r"(vllm:num_requests_running{.*}) ", rf"\1{separator}", capture("busy"))
    assert parse(text).running == 2


def test_line_separators_of_unicode_do_not_end_a_line() -> None:
    text = capture("busy").replace('model_name="tiny"', 'model_name="a\u2028b\x85c\x0bd"')
    assert parse(text) == parse(capture("busy"))


def test_openmetrics_says_the_same_as_prometheus_text() -> None:
    kept = [line for line in capture("busy").splitlines() if not line.startswith("#")]
    exemplar = [f'{line} # {{trace_id="a}}b"}} 0.1 1.5' if "_bucket" in line else line for line in kept]
    text = "\n".join([*exemplar, "# EOF"]) + "\n"
    openmetrics = parse(text, content_type="application/openmetrics-text; version=1.0.0")
    assert openmetrics == parse(capture("busy"))


def test_an_openmetrics_page_that_is_cut_off_is_refused() -> None:
    with pytest.raises(PageError, match="EOF"):
        parse(capture("busy"), content_type="application/openmetrics-text; version=1.0.0")


def test_a_page_without_series_of_the_prefix_is_no_snapshot() -> None:
    text = without(capture("busy"), "vllm:")
    assert PageParser("vllm:").parse(text, content_type=TEXT, t_s=0, monotonic_s=0) is None


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0" 2.0',
        'vllm:num_requests_running{engine="0"} two',
        'vllm:num_requests_running{engine="0"}',
        'vllm:num_requests_running{engine="0"model="a"} 2.0',
        "vllm:num_requests_running{engine=0} 2.0",
        "vllm:num_requests_running{engine} 2.0",
        "vllm:num_requests_running-2.0",
        'vllm:time_to_first_token_seconds_bucket{engine="0"} 2.0',
        'vllm:time_to_first_token_seconds_bucket{le="soon"} 2.0',
    ],
)
def test_a_broken_line_of_a_needed_series_is_refused(line: str) -> None:
    with pytest.raises(PageError):
        parse(line + "\n")


def test_a_broken_line_of_another_series_does_not_matter() -> None:
    assert parse(capture("busy") + "vllm:something_else{ 7\nhttp_requests_total{ x\n").running == 2


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1"])
def test_a_value_that_cannot_be_is_unknown(value: str) -> None:
    text = capture("busy").replace(
        'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0',
        f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {value}',
    )
    assert parse(text).running is None


def test_an_engine_that_is_not_awake_is_asleep() -> None:
    awake = 'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"}'
    assert parse(capture("busy").replace(f"{awake} 1.0", f"{awake} 0.0")).asleep is True


def test_label_values_may_hold_braces_quotes_and_spaces() -> None:
    text = capture("busy").replace('model_name="tiny"', r'model_name="a} b \" {c"')
    assert parse(text) == parse(capture("busy"))


@pytest.mark.parametrize(
    "labels",
    ["{}", "{ }", ' {model_name="tiny",}', '{model_name = "tiny" , \t}', '{"model.name"="a}",model_name="\\\\"}', "\t"],
)
def test_labels_may_be_written_in_any_way_that_the_formats_allow(labels: str) -> None:
    text = without(capture("busy"), "vllm:num_requests_running")
    assert parse(f"{text}vllm:num_requests_running{labels} 7\n").running == 7


def test_a_long_line_that_does_not_matter_is_passed_over() -> None:
    text = f'vllm:lora_requests_info{{running_lora_adapters="{"a" * 100_000}"}} 1.0\n'
    assert parse(text + capture("busy")) == parse(capture("busy"))
