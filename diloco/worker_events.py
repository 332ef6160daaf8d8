"""How a rank worker speaks to its agent: a line of JSON per event, on what was its stdout."""

from __future__ import annotations

import os
import sys
import threading
from typing import TextIO

from diloco.inbox import Inbox
from diloco.protocol import Event

PIPE = threading.Lock()
"""Of the events: one line at a time."""


def take_stdout() -> TextIO:
    """The event pipe, which was stdout. Stdout itself is stderr from now on, so that no library can write events."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def emit(events: TextIO, event: Event, inbox: Inbox) -> None:
    """Say something to the agent; from any thread."""
    try:
        with PIPE:
            events.write(event.model_dump_json() + "\n")
            events.flush()
    except BrokenPipeError:
        inbox.request_stop()
