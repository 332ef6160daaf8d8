"""What the trainers beside the server did since the last scrape, from the records that they keep in the gate's folder.

A record holds totals of seconds per phase, so that the difference over a scrape interval is exact, up to the beat of
the record (0.2 s; the beginning and end of a sync are written at once). Phases mix within an interval, and one counts:

    sync    where a trainer was in a sync for at least `MIN_SHARE` of the interval
    inner   else, where one took inner steps for at least `MIN_SHARE` of it
    none    else

Several trainers: the strongest phase, sync before inner before none. A trainer that told nothing in an interval which
is shorter than its beat does what it did last; one whose record is older than `ALIVE_NS` is dead, and does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diloco.trainer_schema import TRAINER_BYTES, TRAINER_GLOB, TrainerPhase, TrainerRecord, decode_trainer
from sidecar.calibrator import Phase
from sidecar.schema import TrainerStatus
from sidecar.vllm_plugin.files import open_regular

MIN_SHARE = 0.1
"""Requests of an interval of which a smaller part was disturbed stand for the other phase rather."""
ALIVE_NS = 2 * 10**9
"""Ten beats: a trainer that gets only what the server leaves was seen to be late by half a second."""
AHEAD_NS = 10 * 10**9
"""A record from further in the future is of another boot."""
ATTEMPTS = 4
MAX_TRAINERS = 64
BY_STRENGTH = (Phase.SYNC, Phase.INNER, Phase.NONE)

Spent = Mapping[Phase, float]
"""Seconds per phase."""


@dataclass(slots=True)
class Trainer:
    """One trainer, followed from the first record on."""

    record: TrainerRecord
    spent_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    """Since the interval began."""

    def follow(self, record: TrainerRecord) -> dict[Phase, float]:
        """Take in the next record; what it adds, in seconds per phase."""
        passed_ns = record.at_ns - self.record.at_ns
        gained_s = {}
        for phase in Phase:
            name = TrainerPhase(phase)
            gained_ns = record.spent_ns(name) - self.record.spent_ns(name)
            gained_s[phase] = min(max(gained_ns, 0), max(passed_ns, 0)) / 1e9
            self.spent_s[phase] += gained_s[phase]
        self.record = record
        return gained_s

    def is_alive(self, now_ns: int) -> bool:
        return -AHEAD_NS < now_ns - self.record.at_ns <= ALIVE_NS

    def phase_now(self, now_ns: int) -> Phase:
        return Phase(self.record.phase) if self.is_alive(now_ns) else Phase.NONE


class TrainerWatch:
    """Follows every trainer of one gate's folder; never raises for what is in it."""

    def __init__(self, directory: Path, *, now_ns: int) -> None:
        self._directory = directory
        self._trainers: dict[Path, Trainer] = {}
        self._began_ns = self._polled_ns = now_ns
        self.total_s: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
        """Seconds of trainers since the watch began, added over them."""

    def poll(self, now_ns: int) -> None:
        """Read every record."""
        found = sorted(self._directory.glob(TRAINER_GLOB))[:MAX_TRAINERS]
        for path in [path for path in self._trainers if path not in found]:
            if not any(self._trainers[path].spent_s.values()):  # else it still counts for the interval
                del self._trainers[path]
        for path in found:
            record = read_trainer(path)
            if record is None:
                continue
            known = self._trainers.get(path)
            if known is None or record.sequence < known.record.sequence:
                self._trainers[path] = Trainer(record)
                continue
            for phase, gained_s in known.follow(record).items():
                self.total_s[phase] += gained_s
        self._polled_ns = now_ns

    def take(self) -> Phase:
        """The phase of the interval that began with the last call and ends with the last `poll`."""
        interval_s = (self._polled_ns - self._began_ns) / 1e9
        phase = strongest(
            phase_of(trainer.spent_s, interval_s=interval_s, now=trainer.phase_now(self._polled_ns))
            for trainer in self._trainers.values()
        )
        self._began_ns = self._polled_ns
        for trainer in self._trainers.values():
            trainer.spent_s = dict.fromkeys(Phase, 0.0)
        return phase

    def status(self) -> TrainerStatus:
        living = [trainer for trainer in self._trainers.values() if trainer.is_alive(self._polled_ns)]
        return TrainerStatus(
            num_trainers=len(living),
            phase=strongest(trainer.phase_now(self._polled_ns) for trainer in living).value,
            phase_seconds_total={phase.value: seconds for phase, seconds in self.total_s.items()},
        )


def phase_of(spent_s: Spent, *, interval_s: float, now: Phase) -> Phase:
    """The phase that counts for one trainer and interval; ``now`` is what it did last (pure)."""
    whole_s = max(sum(spent_s.values()), interval_s)
    if whole_s <= 0 or not any(spent_s.values()):
        return now
    for phase in (Phase.SYNC, Phase.INNER):
        if spent_s[phase] / whole_s >= MIN_SHARE:
            return phase
    return Phase.NONE


def strongest(phases: Iterable[Phase]) -> Phase:
    return min(phases, key=BY_STRENGTH.index, default=Phase.NONE)


def read_trainer(path: Path) -> TrainerRecord | None:
    """The record in a file; None when there is none, or it stays torn."""
    try:
        fd = open_regular(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(OSError):
                record = decode_trainer(os.pread(fd, TRAINER_BYTES, 0))
                if record is not None:
                    return record
    finally:
        os.close(fd)
    return None
