"""What the ends of workers say about the next start: whose word counts, when to give up, how long to wait."""

from __future__ import annotations

import pytest

from diloco.agent.failures import Deaths, Failure
from diloco.agent.rules import SETTLED_AFTER_S
from diloco.protocol import FailedEvent
from service.errors import InputError, UnavailableError

LOST = FailedEvent(message="lost rank 1", exit_code=UnavailableError.exit_code)
CRASHED = FailedEvent(message="out of memory", exit_code=1)
HOPELESS = FailedEvent(message="no such file", exit_code=InputError.exit_code)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((), ""),
        ((LOST, CRASHED), "out of memory"),
        ((CRASHED, LOST), "out of memory"),
        ((CRASHED, HOPELESS), "no such file"),
    ],
    ids=["none", "lost-first", "lost-last", "hopeless"],
)
def test_the_cause_is_not_the_rank_that_lost_another(events: tuple[FailedEvent, ...], message: str) -> None:
    failure = Failure()
    for event in events:
        failure.note(event)
    assert failure.message == message


def test_what_another_start_would_not_help_ends_the_process_at_once() -> None:
    failure = Failure()
    failure.note(HOPELESS)
    reason = failure.reason_to_give_up(0, start_attempts=3)
    assert reason is not None
    assert reason.exit_code == InputError.exit_code


def test_anything_else_is_tried_as_often_as_the_settings_say() -> None:
    failure = Failure()
    failure.note(CRASHED)
    assert failure.reason_to_give_up(2, start_attempts=3) is None
    reason = failure.reason_to_give_up(3, start_attempts=3)
    assert isinstance(reason, UnavailableError)
    assert "out of memory" in str(reason)


def test_a_worker_that_had_trained_is_replaced_at_once_and_after_that_with_growing_pauses() -> None:
    deaths, pauses = Deaths(), []
    for _ in range(3):
        deaths.note(was_ready=True, lived_s=1.0, step=0)
        pauses.append(deaths.pause_s(first_s=1.0, longest_s=60.0))
    assert pauses == [0.0, 2.0, 4.0]
    deaths.note(was_ready=True, lived_s=1.0, step=7)
    assert deaths.in_a_row == 1, "it got further than those before it"
    deaths.note(was_ready=True, lived_s=1.0, step=7)
    assert deaths.in_a_row == 2
    deaths.note(was_ready=True, lived_s=SETTLED_AFTER_S, step=7)
    assert deaths.in_a_row == 1


def test_failures_at_the_start_are_counted_until_a_worker_is_ready() -> None:
    deaths = Deaths()
    for was_ready in (False, False):
        deaths.note(was_ready=was_ready, lived_s=1.0, step=0)
    assert deaths.start_failures == 2
    assert deaths.pause_s(first_s=1.0, longest_s=60.0) == 2.0
    deaths.note(was_ready=True, lived_s=1.0, step=0)
    assert deaths.start_failures == 0
