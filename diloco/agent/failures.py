"""Why workers failed, in their own words, whether another start would help, and how long to wait before it (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.agent.rules import backoff_s, deaths_in_a_row
from diloco.protocol import FailedEvent
from service.errors import ConfigError, ConflictError, InputError, UnavailableError, WadilocoError

HOPELESS: dict[int, type[WadilocoError]] = {kind.exit_code: kind for kind in (InputError, ConfigError, ConflictError)}
"""Exit codes of a worker that another attempt would not help."""


class Failure:
    """Of the workers of one start. Of several ranks that fail one is the cause: not the one that lost another."""

    def __init__(self) -> None:
        self._event: FailedEvent | None = None

    @property
    def message(self) -> str:
        """Empty when no worker said anything."""
        return self._event.message if self._event else ""

    def note(self, event: FailedEvent) -> None:
        """A rank said that it fails."""
        before = self._event
        if before is None or event.exit_code in HOPELESS or before.exit_code == UnavailableError.exit_code:
            self._event = event

    def reason_to_give_up(self, start_failures: int, *, start_attempts: int) -> WadilocoError | None:
        """The reason not to start another worker, after so many in a row that never were ready."""
        event = self._event
        if event is not None and event.exit_code in HOPELESS:
            return HOPELESS[event.exit_code](event.message)
        if start_failures >= start_attempts:
            why = event.message if event else "see its log above"
            return UnavailableError(f"the worker failed {start_failures} times at its start: {why}", field="worker")
        return None


@dataclass(slots=True)
class Deaths:
    """What the deaths so far say about the next start."""

    start_failures: int = 0
    """In a row, of workers that never were ready."""
    in_a_row: int = 0
    """In quick succession."""
    was_ready: bool = False
    """The last one that died."""
    furthest_step: int = 0

    def note(self, *, was_ready: bool, lived_s: float, step: int) -> None:
        """A worker died after so long, at this step."""
        self.was_ready = was_ready
        self.start_failures = 0 if was_ready else self.start_failures + 1
        self.in_a_row = deaths_in_a_row(self.in_a_row, lived_s=lived_s, got_further=step > self.furthest_step)
        self.furthest_step = max(self.furthest_step, step)

    def pause_s(self, *, first_s: float, longest_s: float) -> float:
        """Before the next start."""
        if self.in_a_row == 1 and self.was_ready:
            return 0.0  # it had trained: what there is to wait for shows when it dies again
        return backoff_s(self.in_a_row, first_s=first_s, longest_s=longest_s)
