"""Tells the sidecar beside the server what this trainer does: nothing, inner steps, or a sync.

The worker names its activity where it changes, which writes at once; how much of the inner activity was waiting at the
gate comes from the safepoint's own account, read five times a second by a thread. A safepoint therefore pays nothing.

Nothing here raises or blocks for long: a folder that is missing or read-only switches the record off with one line in
the log, and the next beat tries again. The folder belongs to the server and is not made here. A record is locked while
its trainer lives, so that the files of killed ones are known, in any namespace, and removed by the next to come.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from diloco.safepoint import Safepoint
from diloco.trainer_schema import TRAINER_BEAT_S, TRAINER_GLOB, TrainerPhase, TrainerRecord, encode_trainer

logger = logging.getLogger(__name__)

OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
EVERYBODY_READS = 0o644


class Waited(NamedTuple):
    """The account of a safepoint."""

    total_s: float = 0.0
    is_waiting: bool = False


def waited_at(safepoint: Safepoint | None) -> Waited:
    """What the safepoint's account says; nothing without one."""
    if safepoint is None:
        return Waited()
    return Waited(safepoint.yielded.total_s, is_waiting=safepoint.yielded.reason is not None)


@dataclass(slots=True)
class PhaseClock:
    """Adds up the time in each phase (pure). Of the inner activity, what was waited at safepoints counts as none."""

    at_ns: int
    activity: TrainerPhase = TrainerPhase.NONE
    phase: TrainerPhase = TrainerPhase.NONE
    spent_ns: dict[TrainerPhase, int] = field(default_factory=lambda: dict.fromkeys(TrainerPhase, 0))
    _waited_s: float = 0.0

    def advance(self, now_ns: int, waited: Waited) -> None:
        """Account for the time since the last call, which the activity of then filled."""
        passed_ns = max(now_ns - self.at_ns, 0)
        waited_ns = min(max(round((waited.total_s - self._waited_s) * 1e9), 0), passed_ns)
        if self.activity is TrainerPhase.INNER:
            self.spent_ns[TrainerPhase.NONE] += waited_ns
            self.spent_ns[TrainerPhase.INNER] += passed_ns - waited_ns
        else:
            self.spent_ns[self.activity] += passed_ns
        self.at_ns, self._waited_s = max(now_ns, self.at_ns), waited.total_s
        self.phase = TrainerPhase.NONE if self._only_waits(waited) else self.activity

    def enter(self, activity: TrainerPhase, now_ns: int, waited: Waited) -> None:
        self.advance(now_ns, waited)
        self.activity = activity
        self.phase = TrainerPhase.NONE if self._only_waits(waited) else activity

    def _only_waits(self, waited: Waited) -> bool:
        return waited.is_waiting and self.activity is TrainerPhase.INNER


class PhaseTeller:
    """One record in a gate's folder; without a folder it says nothing."""

    def __init__(
        self,
        directory: Path | None,
        *,
        slot: int = 0,
        waited: Callable[[], Waited] = Waited,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._directory = directory
        self._slot = slot
        self._waited = waited
        self._clock_ns = clock_ns
        self._phases = PhaseClock(clock_ns())
        self._sequence = 0
        self._path: Path | None = None
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._complaint = ""
        self.beat()

    @property
    def complaint(self) -> str:
        """Why nothing can be written; empty when it can."""
        return self._complaint

    def start(self) -> None:
        """Keep the record current on a thread of its own, which has the priority of the caller."""
        if self._directory is not None:
            threading.Thread(target=self._run, name="phase", daemon=True).start()

    def enter(self, activity: TrainerPhase) -> None:
        """What the trainer does from now on; costs a comparison when that is what it did before."""
        if activity is self._phases.activity or self._directory is None:
            return
        with self._lock:
            self._phases.enter(activity, self._clock_ns(), self._waited())
            self._write()

    def beat(self) -> None:
        """Write where the account stands; make the record (again) if there is none."""
        if self._directory is None or self._stop.is_set():
            return
        with self._lock:
            self._phases.advance(self._clock_ns(), self._waited())
            try:
                if self._fd is not None and not self._is_still_ours(self._fd):
                    self._drop()
                if self._fd is None:
                    self._open(self._directory)
            except OSError as exc:
                self._fail(exc)
            else:
                self._write()

    def close(self) -> None:
        """Remove the record: this trainer ends."""
        self._stop.set()
        with self._lock:
            if self._fd is not None and self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()
            self._drop()

    def _run(self) -> None:
        while not self._stop.wait(TRAINER_BEAT_S):
            self.beat()

    def _write(self) -> None:
        if self._fd is None:
            return
        self._sequence += 1
        phases = self._phases
        record = TrainerRecord(
            sequence=self._sequence,
            at_ns=phases.at_ns,
            none_ns=phases.spent_ns[TrainerPhase.NONE],
            inner_ns=phases.spent_ns[TrainerPhase.INNER],
            sync_ns=phases.spent_ns[TrainerPhase.SYNC],
            pid=os.getpid(),
            slot=self._slot,
            phase=phases.phase,
        )
        try:
            os.pwrite(self._fd, encode_trainer(record), 0)
        except OSError as exc:
            self._fail(exc)
        else:
            self._complaint = ""

    def _open(self, directory: Path) -> None:
        remove_dead_records(directory)
        # Containers share the folder and not the process ids.
        self._path = directory / f"trainer-{os.getpid()}-{secrets.token_hex(4)}.phase"
        self._fd = os.open(self._path, OPEN_FLAGS | os.O_CREAT | os.O_EXCL, EVERYBODY_READS)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _is_still_ours(self, fd: int) -> bool:
        assert self._path is not None
        try:
            here, there = os.fstat(fd), self._path.stat()
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _drop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _fail(self, exc: OSError) -> None:
        self._drop()
        if not self._complaint:
            logger.warning(
                "the sidecar cannot know what this trainer does folder=%s error=%s", self._directory, exc.strerror
            )
        self._complaint = f"{type(exc).__name__}: {exc}"


def remove_dead_records(directory: Path) -> None:
    """Remove the records whose trainers are gone: nobody holds their locks."""
    for path in directory.glob(TRAINER_GLOB):
        with contextlib.suppress(OSError):
            fd = os.open(path, OPEN_FLAGS | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
