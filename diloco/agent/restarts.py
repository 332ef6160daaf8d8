"""How the last worker came back: one line in the log, and one record for the status and the controller."""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Sequence

from diloco.protocol import RestoredEvent
from diloco.schema import MAX_DETAIL, Progress, Restart, Rung

logger = logging.getLogger(__name__)

MAX_UNTOLD = 100


class RestartBook:
    """The recovery that goes on, and those that have ended."""

    def __init__(self) -> None:
        self.last: Restart | None = None
        self.untold: deque[Restart] = deque(maxlen=MAX_UNTOLD)
        """Those that the controller has not confirmed."""
        self._open: Restart | None = None
        self._step_at_death = 0
        self._unsynced_at_death = 0
        self._refused: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def died(self, cause: str, *, rank: int, last_sign_s: float | None, progress: Progress, step: int) -> None:
        """A worker is gone that had got to this step, of which ``progress`` was told."""
        self._open = Restart(cause=cause[:MAX_DETAIL], rank=rank, last_sign_s=last_sign_s, detected_s=time.time())
        self._step_at_death = max(step, progress.step)
        self._unsynced_at_death = progress.inner_steps_since_sync

    def took_slot(self, slot: int, resume: Progress | None) -> None:
        """A slot has come to this agent that others had brought so far."""
        now_s = time.time()
        self._open = Restart(cause=f"slot {slot} came to this agent", detected_s=now_s, fenced_s=now_s)
        self._step_at_death = 0 if resume is None else resume.step
        self._unsynced_at_death = 0 if resume is None else resume.inner_steps_since_sync

    def sought(self, refused: Sequence[str]) -> None:
        """Why nothing better was found of the slot's state, before the worker was started."""
        self._refused = tuple(refused)

    def explain(self, cause: str) -> None:
        """Why it is gone."""
        if self._open is not None:
            self._open = self._open.model_copy(update={"cause": cause[:MAX_DETAIL]})

    def restored(self, event: RestoredEvent) -> None:
        """The next one says where it goes on."""
        if self._open is None:
            return
        refused, self._refused = self._refused + event.refused, ()
        is_exact = event.rung in (Rung.VAULT, Rung.REPLICA) and not event.lost
        behind = max(self._step_at_death - event.step, 0)
        lost = event.lost
        if event.rung in (Rung.GLOBAL, Rung.FRESH):
            lost = f"{self._unsynced_at_death} inner steps since the last sync, and the inner optimizer's state"
        self._open = self._open.model_copy(
            update={
                "rung": event.rung,
                "generation": event.generation,
                "from_step": event.step,
                "fetched_s": event.fetched_s,
                "loaded_s": event.loaded_s,
                "steps_repeated": behind if is_exact else 0,
                "steps_lost": 0 if is_exact else self._unsynced_at_death,
                "lost": lost[:MAX_DETAIL],
                "refused": tuple(reason[:MAX_DETAIL] for reason in refused[:32]),
            }
        )

    def trained(self, progress: Progress) -> Restart | None:
        """It said how far it is: the record, if that ends the recovery."""
        record = self._open
        if record is None or record.rung is None or progress.step <= record.from_step:
            return None
        self._open = None
        self.last = record = record.model_copy(update={"first_step_s": time.time()})
        self.untold.append(record)
        _log(record)
        return record


def cause_of(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _log(record: Restart) -> None:
    def after(at_s: float | None) -> str:
        return "unknown" if at_s is None else f"{max(at_s - record.detected_s, 0.0):.3f}"

    shown_last = "unknown" if record.last_sign_s is None else f"{record.detected_s - record.last_sign_s:.3f}"
    logger.info(
        "recovered rank=%d cause=%s rung=%s generation=%s step=%d steps_repeated=%d steps_lost=%d silent_s=%s "
        "fetched_s=%s loaded_s=%s first_step_s=%s%s%s",
        record.rank,
        record.cause,
        record.rung,
        record.generation,
        record.from_step,
        record.steps_repeated,
        record.steps_lost,
        shown_last,
        after(record.fetched_s),
        after(record.loaded_s),
        after(record.first_step_s),
        f" lost={record.lost}" if record.lost else "",
        f" refused={'; '.join(record.refused)}" if record.refused else "",
    )
