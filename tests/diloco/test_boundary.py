from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco.boundary import StepBoundary, at_once
from service.errors import UnavailableError
from tests.diloco.conftest import wait_until


def test_work_is_done_by_the_thread_that_serves_and_counted() -> None:
    boundary = StepBoundary(threading.Event())
    boundary.serve()
    assert boundary.blocked_s == 0.0
    with ThreadPoolExecutor(1) as transfers:
        result = transfers.submit(boundary, threading.get_ident)
        wait_until(lambda: boundary.is_waiting)
        assert not result.done()
        boundary.serve()
        assert result.result() == threading.get_ident()
    assert not boundary.is_waiting
    assert boundary.blocked_s > 0.0


def test_what_goes_wrong_belongs_to_whoever_wanted_the_work() -> None:
    boundary = StepBoundary(threading.Event())
    with ThreadPoolExecutor(1) as transfers:
        result = transfers.submit(boundary, lambda: 1 / 0)
        wait_until(lambda: boundary.is_waiting)
        boundary.serve()
        with pytest.raises(ZeroDivisionError):
            result.result()


def test_nobody_waits_for_an_inner_loop_that_has_ended() -> None:
    stop = threading.Event()
    boundary = StepBoundary(stop)
    with ThreadPoolExecutor(1) as transfers:
        result = transfers.submit(boundary, lambda: None)
        wait_until(lambda: boundary.is_waiting)
        stop.set()
        with pytest.raises(UnavailableError, match="inner loop has ended"):
            result.result()


def test_without_inner_steps_work_is_done_at_once() -> None:
    assert at_once(threading.get_ident) == threading.get_ident()
