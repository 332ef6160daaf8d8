from pathlib import Path

import pytest

from replay.timeline import (
    LoadPoint,
    RequestPoint,
    RunTimeline,
    StepPoint,
    SyncWindow,
    arrivals_per_s,
    draw_timeline,
    steps_per_s,
)
from service.errors import UnavailableError

PNG = b"\x89PNG\r\n\x1a\n"


def timeline(label: str = "ours") -> RunTimeline:
    return RunTimeline(
        label=label,
        duration_s=30.0,
        requests=(
            *(RequestPoint(0.1 * index, 50.0 + 5 * index, violated=index > 30) for index in range(60)),
            RequestPoint(29.9, None, violated=True),
            RequestPoint(35.0, 80.0, violated=False),
        ),
        load=tuple(LoadPoint(float(second), float(second % 7), 0.0) for second in range(31)),
        steps=tuple(StepPoint(float(second), 4 * second) for second in range(31)),
        syncs=(SyncWindow(8.0, 9.5, 0), SyncWindow(8.0, 9.5, 1)),
    )


def draw(path: Path, *runs: RunTimeline) -> bytes:
    draw_timeline(runs, path, slo="e2e:200ms", threshold_ms=200, title="bursty.jsonl, 30 s")
    return path.read_bytes()


def size(png: bytes) -> tuple[int, int]:
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_the_picture_is_1280_wide_and_grows_by_a_row_per_run(tmp_path: Path) -> None:
    one, three = draw(tmp_path / "1.png", timeline()), draw(tmp_path / "3.png", *[timeline()] * 3)
    assert one.startswith(PNG)
    assert size(one)[0] == size(three)[0] == 1280
    assert size(three)[1] > 2 * size(one)[1]


def test_very_many_runs_are_cut_to_a_picture_that_a_screen_shows(tmp_path: Path) -> None:
    assert size(draw(tmp_path / "many.png", *[timeline()] * 40))[1] < 3000


def test_runs_without_anything_to_draw_are_drawn(tmp_path: Path) -> None:
    empty = RunTimeline("empty", 10.0, ())
    only_failures = RunTimeline("down", 10.0, (RequestPoint(1.0, None, violated=True),), steps=(StepPoint(0.0, 3),))
    assert draw(tmp_path / "a.png", empty, only_failures).startswith(PNG)
    assert draw(tmp_path / "b.png").startswith(PNG)


def test_drawing_leaves_no_trace_in_the_process(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    draw(tmp_path / "a.png", timeline())
    assert dict(mpl.rcParams) == before


def test_a_picture_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        draw(tmp_path / "absent" / "a.png", timeline())
    assert caught.value.field == "--out"


def test_arrivals_are_counted_by_the_second_with_late_ones_in_the_last() -> None:
    run = RunTimeline("r", 3.0, tuple(RequestPoint(at_s, 1.0, violated=False) for at_s in (0.0, 0.9, 2.0, 3.0, 7.0)))
    assert arrivals_per_s(run).tolist() == [2, 0, 3]


def test_a_restart_of_the_step_count_leaves_a_gap() -> None:
    points = [StepPoint(0, 0), StepPoint(2, 8), StepPoint(3, 1), StepPoint(3, 1), StepPoint(4, 6)]
    assert list(steps_per_s(points)) == [(0, 2, 4), (3, 4, 5)]
