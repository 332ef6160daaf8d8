import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.make_trace import DURATION_S, make_requests, to_line
from replay.traces import Request, Trace, burstiness, read_trace, slice_trace
from service.errors import InputError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:33.4590290,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:01+00:00,76,15
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
50,GPT-4,417,0,417,API log
118,ChatGPT,417,276,693,"API log, other"
"""
MOONCAKE = """{"timestamp": 0, "input_length": 40160, "output_length": 6, "hash_ids": [0, 1, 2]}
{"timestamp": 27482, "input_length": 36640, "output_length": 4, "hash_ids": [79]}
{"timestamp": 30535, "input_length": 7, "output_length": 500, "hash_ids": []}
"""
PLAIN = """{"arrival_s": 1.5, "input_tokens": 10, "output_tokens": 20}
{"arrival_s": 1.5, "input_tokens": 11, "output_tokens": 0}

{"arrival_s": 4, "input_tokens": 12.0, "output_tokens": 22}
"""
SHARED = Path(os.environ.get("WADILOCO_TEST_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


def write(tmp_path: Path, text: str | bytes, name: str = "trace.dat") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(request.input_tokens, request.output_tokens) for request in trace.requests]


@pytest.mark.parametrize(
    ("text", "format_", "arrivals_s", "expected"),
    [
        (AZURE, "azure", [0, 0.052, 29.479069], [(4808, 10), (3180, 8), (110, 27)]),
        (AZURE_2024, "azure", [0, 0.007405, 0.99007], [(2162, 5), (2399, 6), (76, 15)]),
        (BURSTGPT, "burstgpt", [0, 40, 113], [(472, 18), (1087, 230), (417, 276)]),
        (MOONCAKE, "mooncake", [0, 27.482, 30.535], [(40160, 6), (36640, 4), (7, 500)]),
        (PLAIN, "plain", [0, 0, 2.5], [(10, 20), (11, 0), (12, 22)]),
    ],
    ids=["azure-2023", "azure-2024", "burstgpt", "mooncake", "plain"],
)
def test_each_public_format_is_recognised_by_its_content(
    tmp_path: Path, text: str, format_: str, arrivals_s: Sequence[float], expected: list[tuple[int, int]]
) -> None:
    trace = read_trace(write(tmp_path, text))
    assert trace.format == format_
    assert trace.name == "trace.dat"
    assert [request.arrival_s for request in trace.requests] == pytest.approx(arrivals_s, abs=2e-6)
    assert lengths(trace) == expected
    assert read_trace(write(tmp_path, text), format_) == trace


def test_failed_burstgpt_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, BURSTGPT)).num_skipped == 1


def test_a_byte_order_mark_and_windows_line_ends_are_harmless(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode()
    assert lengths(read_trace(write(tmp_path, text))) == [(4808, 10), (3180, 8), (110, 27)]


def test_columns_may_stand_in_any_order(tmp_path: Path) -> None:
    text = "Total tokens,Response tokens,Timestamp,Request tokens\n3,2,0.5,1\n7,4,1.5,3\n"
    assert lengths(read_trace(write(tmp_path, text))) == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("", ["is empty"]),
        ("\n\n", ["is empty"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ["no request"]),
        ("Timestamp,Request tokens,Response tokens\n1,5,0\n", ["no request", "all 1 rows"]),
        ("time,prompt\n1,2\n", ["line 1", "unknown trace format", "time", "ContextTokens", "arrival_s"]),
        ('{"t": 1}\n', ["line 1", "unknown trace format", "input_length"]),
        ("[1, 2]\n", ["line 1", "unknown trace format"]),
        (AZURE + "2023-11-16 18:17:30.0,1,2\n", ["line 5", "3.45903 s before", "sort"]),
        (AZURE.replace("3180", "-1"), ["line 3", "ContextTokens", "'-1'"]),
        (AZURE.replace("3180", "nan"), ["line 3", "ContextTokens", "'nan'"]),
        (AZURE.replace("3180", "inf"), ["line 3", "ContextTokens"]),
        (AZURE.replace("3180", "12.5"), ["line 3", "ContextTokens", "whole number"]),
        (AZURE.replace("3180", ""), ["line 3", "ContextTokens"]),
        (AZURE.replace(",8\n", "\n"), ["line 3", "GeneratedTokens", "missing"]),
        (AZURE.replace("2023-11-16 18:17:04", "yesterday"), ["line 3", "TIMESTAMP", "yesterday"]),
        (BURSTGPT.replace("\n5,", "\n-5,"), ["line 2", "Timestamp", "'-5'"]),
        (BURSTGPT.replace("\n5,", "\nnan,"), ["line 2", "Timestamp"]),
        (MOONCAKE.replace("27482", "-1"), ["line 2", "timestamp", "-1"]),
        (MOONCAKE.replace('"output_length": 4, ', ""), ["line 2", "output_length", "missing"]),
        (PLAIN.replace("11", "true"), ["line 2", "input_tokens", "True"]),
        (PLAIN.replace("11", "null"), ["line 2", "input_tokens", "None"]),
        (PLAIN.replace("11", "1e400"), ["line 2", "input_tokens"]),
        (PLAIN.replace("11", '"1' + "0" * 5000 + '"'), ["line 2", "input_tokens"]),
        (PLAIN + "{broken\n", ["line 5", "not JSON"]),
        (PLAIN + "[1]\n", ["line 5", "not a JSON object"]),
        (PLAIN + "[" * 100_000 + "\n", ["line 5", "not JSON"]),
        (b"\x1f\x8b\x08\x00\x00\xff", ["line 1", "UTF-8", "unpack"]),
        (AZURE.encode() + b"\xff\xfe,1,2\n", ["line 5", "UTF-8"]),
        (b"x" * (2 << 20), ["line 1", "longer than"]),
    ],
)
def test_a_bad_file_is_refused_with_its_place_and_the_remedy(
    tmp_path: Path, text: str | bytes, needles: Sequence[str]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert caught.value.field == str(path)
    assert caught.value.remedy
    for needle in needles:
        assert needle in str(caught.value)


def test_a_named_format_demands_its_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ContextTokens: no such column"):
        read_trace(write(tmp_path, BURSTGPT.replace("Timestamp", "TIMESTAMP")), "azure")


def test_an_unknown_format_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="azure, burstgpt, mooncake, plain"):
        read_trace(write(tmp_path, AZURE), "parquet")


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="directory"):
        read_trace(tmp_path)


@given(st.binary(max_size=300))
def test_garbage_is_read_or_refused_but_never_crashes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage"
    for prefix in (b"", AZURE.encode(), MOONCAKE.encode(), PLAIN.encode()):
        path.write_bytes(prefix + data)
        try:
            trace = read_trace(path)
        except InputError:
            continue
        assert trace.requests


def trace_of(*arrivals_s: float, duration_s: float) -> Trace:
    requests = tuple(Request(time_s, index + 1, 1) for index, time_s in enumerate(arrivals_s))
    return Trace("t", "plain", requests, duration_s)


def test_scaling_the_rate_compresses_time_and_keeps_the_order_of_lengths() -> None:
    trace = slice_trace(trace_of(0, 2, 4, 6, duration_s=8), rate_scale=4)
    assert [request.arrival_s for request in trace.requests] == [0, 0.5, 1, 1.5]
    assert trace.duration_s == 2


def test_a_slice_counts_from_its_own_start_and_excludes_its_end() -> None:
    trace = slice_trace(trace_of(0, 2, 4, 6, duration_s=8), start_s=1, duration_s=5)
    assert [(request.arrival_s, request.input_tokens) for request in trace.requests] == [(1, 2), (3, 3)]
    assert trace.duration_s == 5


def test_a_slice_past_the_end_goes_on_at_the_beginning() -> None:
    trace = slice_trace(trace_of(0, 2, 4, 6, duration_s=8), start_s=5, duration_s=14)
    assert [(request.arrival_s, request.input_tokens) for request in trace.requests] == [
        (1, 4),
        (3, 1),
        (5, 2),
        (7, 3),
        (9, 4),
        (11, 1),
        (13, 2),
    ]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"rate_scale": 0.0}, "--rate-scale"),
        ({"rate_scale": float("nan")}, "--rate-scale"),
        ({"start_s": -1.0}, "--start-s"),
        ({"start_s": 8.0}, "--start-s"),
        ({"start_s": float("nan")}, "--start-s"),
        ({"duration_s": 0.0}, "--duration-s"),
        ({"duration_s": float("inf")}, "--duration-s"),
        ({"duration_s": 1e9}, "--duration-s"),
        ({"rate_scale": 1e9, "duration_s": 10.0}, "--duration-s"),
        ({"start_s": 6.5, "duration_s": 1.0}, "--start-s"),
    ],
)
def test_a_slice_that_cannot_be_names_the_option(arguments: dict[str, float], field: str) -> None:
    with pytest.raises(InputError) as caught:
        slice_trace(trace_of(0, 2, 4, 6, duration_s=8), **arguments)
    assert caught.value.field == field
    assert caught.value.remedy


def test_an_empty_slice_names_all_three_options() -> None:
    with pytest.raises(InputError, match=r"--start-s.*--duration-s.*--rate-scale"):
        slice_trace(trace_of(0, 5, duration_s=10), start_s=1, duration_s=2)


@given(
    gaps_s=st.lists(st.floats(0, 5), min_size=1, max_size=30),
    rate_scale=st.floats(0.1, 10),
    start_frac=st.floats(0, 0.99),
    duration_s=st.floats(0.1, 60),
)
def test_a_slice_is_ordered_and_inside_its_bounds(
    gaps_s: list[float], rate_scale: float, start_frac: float, duration_s: float
) -> None:
    arrivals_s = [sum(gaps_s[:index]) for index in range(len(gaps_s))]
    trace = trace_of(*arrivals_s, duration_s=arrivals_s[-1] + 1)
    start_s = trace.duration_s / rate_scale * start_frac
    try:
        cut = slice_trace(trace, rate_scale=rate_scale, start_s=start_s, duration_s=duration_s)
    except InputError:
        return
    times_s = [request.arrival_s for request in cut.requests]
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert times_s[-1] < duration_s


def test_a_whole_lap_holds_every_request_once() -> None:
    trace = trace_of(0, 1, 1, 3.5, duration_s=4)
    cut = slice_trace(trace, start_s=2.5, duration_s=4)
    assert sorted(request.input_tokens for request in cut.requests) == [1, 2, 3, 4]


def test_requests_that_arrive_all_at_once_still_have_a_duration(tmp_path: Path) -> None:
    line = json.dumps({"arrival_s": 7, "input_tokens": 1, "output_tokens": 1}) + "\n"
    trace = read_trace(write(tmp_path, line * 3))
    assert trace.duration_s == 1
    assert burstiness(trace).mean_rate_per_s == 3


def test_burstiness_of_an_even_and_an_uneven_trace() -> None:
    even = burstiness(trace_of(0, 1, 2, 3, duration_s=4))
    assert (even.mean_rate_per_s, even.peak_rate_per_s, even.variance_to_mean, even.empty_frac) == (1, 1, 0, 0)
    uneven = burstiness(trace_of(0, 0.1, 0.2, 0.3, duration_s=4))
    assert (uneven.mean_rate_per_s, uneven.peak_rate_per_s, uneven.variance_to_mean, uneven.empty_frac) == (
        1,
        4,
        3,
        0.75,
    )


def test_the_projects_own_trace_is_what_its_script_makes() -> None:
    path = Path(__file__).parents[2] / "replay" / "data" / "bursty.jsonl"
    assert path.read_text() == "".join(to_line(request) for request in make_requests())
    assert path.stat().st_size < 300_000
    trace = read_trace(path)
    assert 0.95 * DURATION_S < trace.duration_s <= DURATION_S
    shape = burstiness(trace)
    assert shape.variance_to_mean > 4
    assert shape.empty_frac > 0.3


@pytest.mark.skipif(not SHARED.is_dir(), reason="public traces are not on this machine")
def test_public_traces_read_whole() -> None:
    azure = read_trace(SHARED / "AzureLLMInferenceTrace_code.csv")
    assert (azure.format, len(azure.requests)) == ("azure", 8819)
    assert azure.requests[-1].arrival_s == pytest.approx(3436, abs=1)
    assert burstiness(azure).peak_rate_per_s == 67
    mooncake = read_trace(SHARED / "mooncake_synthetic_head.jsonl")
    assert (mooncake.format, len(mooncake.requests)) == ("mooncake", 400)
