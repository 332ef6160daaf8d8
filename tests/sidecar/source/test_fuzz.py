"""The reader of pages under any bytes: it ends, raises nothing but its own error, and what it says can be used."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.config import SidecarSettings
from sidecar.observer import Observer
from sidecar.source.page import MAX_COUNT, PageError
from sidecar.source.parse import MAX_LINE_BYTES, PageParser, PageTooLargeError, parse_sample
from sidecar.source.signals import wanted_names
from sidecar.source.snapshot import EngineSnapshot, Histogram
from tests.sidecar.helpers import TEXT, capture, good, parse

CAPTURES = tuple(capture(name).encode() for name in ("idle", "busy", "dp2", "multiprocess-idle", "multiprocess-busy"))
NAMES = sorted(name for name, _ in wanted_names("vllm:"))
VALUES = st.one_of(
    st.sampled_from(["NaN", "+Inf", "-Inf", "0x1", "1_0", "1e400", "-0", "", "1 2 3", "\uff11"]),
    st.floats().map(str),
    st.integers().map(str),
)
LABELS = st.dictionaries(
    st.sampled_from(["engine", "le", "reason", "sleep_state", "ReplicaId", "num_gpu_blocks", "block_size"]),
    st.one_of(st.sampled_from(["0", "1", "+Inf", "1.0", "NaN", "awake", "capacity"]), st.text(max_size=8)),
    max_size=4,
)


def line_of(name: str, labels: dict[str, str], value: str) -> str:
    inner = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value}\n"


LINES = st.builds(line_of, st.sampled_from([*NAMES, "process_start_time_seconds"]), LABELS, VALUES)


def read(page: bytes, *, pieces: int = 1 << 16, content_type: str = TEXT, t_s: float = 1.0) -> EngineSnapshot | None:
    """The snapshot of a page that comes in ``pieces``; None when it has no series or is refused."""
    reader = PageParser("vllm:").reader(content_type)
    try:
        for start in range(0, len(page), pieces):
            reader.feed(page[start : start + pieces])
        return reader.finish(t_s=t_s, monotonic_s=t_s)
    except PageError:
        return None


def check(snapshot: EngineSnapshot | None) -> None:
    """Numbers of a snapshot are finite and within bounds, histograms ascend."""
    if snapshot is None:
        return
    for field in fields(snapshot):
        value = getattr(snapshot, field.name)
        if isinstance(value, float):
            assert math.isfinite(value), field.name
        if isinstance(value, Histogram):
            assert value.edges[-1] == math.inf
            assert list(value.edges) == sorted(set(value.edges))
            assert list(value.cumulative) == sorted(value.cumulative)
            assert 0 <= value.cumulative[0] <= value.count <= MAX_COUNT


@given(st.binary(max_size=4000), st.sampled_from([TEXT, "application/openmetrics-text", ""]))
def test_any_bytes(page: bytes, content_type: str) -> None:
    check(read(page, content_type=content_type))


@given(st.lists(LINES, max_size=40))
def test_any_values_and_labels_of_the_series_that_matter(lines: list[str]) -> None:
    check(read("".join(lines).encode()))


@given(
    st.sampled_from(CAPTURES),
    st.lists(st.tuples(st.integers(0, 80_000), st.binary(max_size=12), st.integers(0, 12)), max_size=12),
    st.integers(0, 90_000),
)
def test_real_pages_with_bytes_changed_inserted_lost_and_cut(
    page: bytes, edits: list[tuple[int, bytes, int]], length: int
) -> None:
    for place, inserted, lost in edits:
        page = page[:place] + inserted + page[place + lost :]
    check(read(page[:length]))


@given(st.sampled_from(CAPTURES), st.integers(1, 9000))
def test_a_page_says_the_same_in_whatever_pieces_it_comes(page: bytes, pieces: int) -> None:
    assert read(page, pieces=pieces) == parse(page.decode(), t_s=1.0)


@given(st.lists(st.tuples(st.sampled_from(CAPTURES), st.lists(LINES, max_size=12)), min_size=2, max_size=6))
def test_the_observer_makes_usable_samples_of_whatever_was_read(pages: list[tuple[bytes, list[str]]]) -> None:
    observer = Observer(SidecarSettings(vllm="http://host", node="host"), t_s=0.0, monotonic_s=0.0)
    for number, (page, lines) in enumerate(pages):
        replaced = {line.partition("{")[0].encode() for line in lines}
        kept = [line for line in page.splitlines(keepends=True) if line.partition(b"{")[0] not in replaced]
        snapshot = read(b"".join(kept) + "".join(lines).encode(), t_s=1.0 + number)
        if snapshot is not None:
            sample = observer.observe(good(snapshot))
            assert type(sample).model_validate_json(sample.model_dump_json()) == sample
            observer.slo_report(now_s=snapshot.monotonic_s)
            observer.calibration(sync_duration_s=5.0)


HOSTILE_HEADS = ("", " ", "{", '{a="', '{a="b"', "{a", '{"', "{ ", '{a="b",', '{a="b"} ')
HOSTILE_RUNS = (*' \t1a"{}\\,=', " ,", '{a="', '{a="\\', '{a="b",', 'a="b",', 'a="b" ')
READ_THEM = """
import sys
from sidecar.source import parse
parse.MAX_LINE_BYTES = 1 << 20  # as long as the bound stands no line gets here
for line in sys.stdin.buffer.read().split(b"\\n"):
    try:
        parse.parse_sample(line)
    except parse.PageError:
        pass
"""


@pytest.mark.timeout(60)
def test_runs_of_anything_are_read_in_linear_time() -> None:
    """160 lines of 64 KB: under a second where each takes linear time, one alone takes 16 s where it is quadratic."""
    lines = [
        f"vllm:num_requests_running{head}{run * (65_000 // len(run))}" for head in HOSTILE_HEADS for run in HOSTILE_RUNS
    ]
    page = "\n".join(lines).encode()
    subprocess.run([sys.executable, "-c", READ_THEM], input=page, timeout=30, check=True)


@pytest.mark.parametrize("run", HOSTILE_RUNS)
def test_a_line_that_matters_has_a_bound(run: str) -> None:
    line = f"vllm:num_requests_running{{{run * MAX_LINE_BYTES}"
    with pytest.raises(PageTooLargeError):
        parse_sample(line.encode())
    with pytest.raises(PageTooLargeError):
        parse(line + "\n")
