"""An error that comes with every tick is one traceback and a line a minute."""

from __future__ import annotations

import logging

import pytest

from service.repeats import Repeats


def test_the_first_is_whole_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    repeats = Repeats(logging.getLogger("probe"), monotonic=lambda: now_s)
    for tick in range(250):
        now_s = tick * 0.5
        repeats.error("tick failed", ValueError(f"at {tick}"))
    assert [(record.exc_info is not None, record.getMessage()) for record in caplog.records] == [
        (True, "tick failed"),
        (False, "tick failed, still: 120 times since error=ValueError: at 120"),
        (False, "tick failed, still: 120 times since error=ValueError: at 240"),
    ]


def test_another_kind_of_error_is_told_whole(caplog: pytest.LogCaptureFixture) -> None:
    repeats = Repeats(logging.getLogger("probe"), monotonic=lambda: 0.0)
    for message, exc in (("a", ValueError()), ("a", KeyError()), ("b", ValueError()), ("a", ValueError())):
        repeats.error(message, exc)
    assert [record.getMessage() for record in caplog.records] == ["a", "a", "b"]
    assert all(record.exc_info for record in caplog.records)
