"""Takes the snapshots of one rank: starts each at a step boundary, copies it beside the next step, and commits it.

The step waits in two places only: when the next snapshot begins and the last one has not ended, and before anything
changes that is being copied (`Snapshots.settle`): the optimizer's step, new global parameters. With several ranks that
is before gradients are added up. All ranks take their snapshots at the same boundaries and under the same numbers, and
agree before each on the newest that all have committed, which none of them overwrites: so there is always one that all
have, whoever dies when.

A snapshot that fails stops nothing. It is told once, and tried again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from diloco.vault.contents import Hot
from diloco.vault.errors import VaultError
from diloco.vault.file import VaultFile
from diloco.vault.interval import Interval
from diloco.vault.layout import Generation, Part, RegionNeed
from diloco.vault.members import Vector
from diloco.vault.part import PartWriter, Table, table_of
from diloco.vault.stolen import StolenTime

logger = logging.getLogger(__name__)

HOT_MARGIN_BYTES = 1 << 16
RECORD_MARGIN = 2
RECORD_BYTES = 1 << 15
FIRST = 2
"""Snapshots whose cost says nothing: each region is mapped into the process when it is first written to."""
RETRY_STEPS = 32
"""After a snapshot that failed."""
WRITER_WAIT_S = 8.0
"""For a worker whose agent was killed, and which ends by itself."""
VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What one snapshot is of."""

    step: int
    tokens: int
    skipped: int
    hot: Hot
    vectors: tuple[Vector, ...] = ()
    versions: tuple[int, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a vault must have room for."""

    regions: tuple[RegionNeed, ...]
    record_bytes: int


class Team(Protocol):
    """What the ranks agree on."""

    num_ranks: int

    def newest_of_all(self, number: int) -> int:
        """The lowest of the numbers that the ranks bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose snapshots they are."""

    run_id: str
    instance: str
    slot: int
    rank: int
    num_ranks: int
    model: str


@dataclass(slots=True)
class Job:
    """A snapshot under way."""

    generation: Generation
    writers: list[tuple[str, PartWriter, dict[str, Tensor]]]
    regions: dict[str, int]
    keys: dict[str, tuple[object, ...]]
    kept: list[Part]
    begun_s: float = 0.0


class Snapshots:
    """The snapshots of one rank. All methods are for the thread of the inner loop, unless they say otherwise."""

    def __init__(
        self,
        identity: Identity,
        collect: Callable[[], Contents],
        *,
        team: Team,
        first_number: int,
        threads: int,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``collect`` says what a snapshot is of; numbers go on from ``first_number``. ``tell`` hears why there are
        none, and an empty text when there are again.
        """
        self._identity = identity
        self._collect = collect
        self._team = team
        self._number = first_number
        self._tell = tell
        self._vault: VaultFile | None = None
        self._interval = Interval()
        self._stolen = StolenTime(threads=threads)
        self._copied = threading.Event()
        self._copied.set()
        self._job: Job | None = None
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._parts: dict[tuple[object, ...], Part] = {}
        """Parts of the newest generation, by what names their values."""
        self._cost_s: float | None = None
        self._blocked_s = 0.0
        self._first = 0
        self._taken_at_step: int | None = None
        self._retry_at_step = 0
        self.committed = 0
        """Number of the newest generation; 0 before the first."""
        self.committed_step: int | None = None
        self._known: frozenset[tuple[object, ...]] = frozenset()
        """What names the values of the newest generation's parts."""
        self.failure = ""

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next."""
        return self._interval.steps

    @property
    def overhead(self) -> float | None:
        return self._interval.overhead

    @property
    def has_vault(self) -> bool:
        return self._vault is not None

    def need(self, contents: Contents, *, room_for_more: int, per_fragment: int) -> Need:
        """What a vault must have room for, now that the optimizer has its state."""
        hot = table_of(contents.hot.tensors, contents.hot.state).num_bytes
        regions = [RegionNeed(hot + hot // 64 + room_for_more + HOT_MARGIN_BYTES, 2)]
        for vector in contents.vectors:
            if vector.name.startswith("global/"):
                size = table_of({VALUES: vector.values}).num_bytes
                regions.append(RegionNeed(size, per_fragment))
        record = self._generation(contents, ()).model_dump_json()
        return Need(regions=tuple(regions), record_bytes=RECORD_MARGIN * len(record) + RECORD_BYTES)

    def open(self, path: Path, need: Need | None = None) -> bool:
        """Write to this vault from now on; says whether it is one that has room for ``need``."""
        try:
            vault = VaultFile.open(path, write_within_s=WRITER_WAIT_S)
        except VaultError as exc:
            self._fail(exc)
            return False
        if need is not None and not vault.layout.fits(need.regions, record_bytes=need.record_bytes):
            vault.close()
            return False
        self._vault, self._parts, self._retry_at_step = vault, {}, 0
        self._first = FIRST
        return True

    def reopen(self, path: Path, need: Need) -> bool:
        """See that the vault that is there has room for ``need``, and write to it; says whether it has."""
        if self._vault is None:
            return self.open(path, need)
        if self._vault.layout.fits(need.regions, record_bytes=need.record_bytes):
            return True
        self.settle()
        self._vault.close()
        self._vault = None
        return False

    def go_on_from(self, vault: VaultFile, generation: Generation) -> None:
        """It is what the rank was restored from, kept until there is a newer one. The vault is ours from now on."""
        self._vault, self._first = vault, FIRST
        self.committed, self.committed_step = generation.number, generation.step
        self._number = max(self._number, generation.number)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot begins at this step boundary."""
        if self._vault is None or step < self._retry_at_step:
            return False
        return self._taken_at_step is None or step - self._taken_at_step >= self._interval.steps

    def take_step(self, step_s: float) -> bool:
        """A step has ended, which took so long; says whether the interval is another one now."""
        cost_s, self._cost_s = self._cost_s, None
        self._interval.take_step(max(step_s - (cost_s or 0.0), 0.0))
        if cost_s is None or not self._copied.is_set():
            self._cost_s = cost_s
            return False
        cost_s += self._blocked_s
        self._blocked_s = 0.0
        if self._first > 0:
            self._first -= 1
            return False
        return self._interval.take_cost(cost_s)

    def take(self) -> int:
        """Begin a snapshot; returns its number. All ranks do this at the same boundary."""
        started_s = time.perf_counter()
        self.settle()
        self._number += 1
        keep = self._team.newest_of_all(self.committed)
        try:
            self._begin(self._number, keep)
        except (VaultError, BufferError, MemoryError, ValueError) as exc:
            self._fail(exc)
        self._blocked_s += time.perf_counter() - started_s
        return self._number

    def settle(self) -> None:
        """Wait until nothing is being copied any more: what was copied may change now."""
        if self._copied.is_set():
            return
        started_s = time.perf_counter()
        self._copied.wait()
        self._blocked_s += time.perf_counter() - started_s

    def wait_copied(self, *, timeout_s: float) -> bool:
        """From any thread: wait for the end of the snapshot under way, if there is one; says whether it came."""
        return self._copied.wait(timeout_s)

    def knows(self, key: tuple[object, ...]) -> bool:
        """From any thread: whether the newest generation has a part with these values."""
        return key in self._known

    def mark_unsure(self) -> None:
        """From any thread: a contribution is pushed that no generation knows of."""
        if self._vault is not None:
            self._vault.mark_unsure()

    def close(self) -> None:
        """End the snapshot under way, and the thread."""
        self.settle()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._job = None
            self._wanted.set()
            thread.join()
        if self._vault is not None:
            self._vault.close()
            self._vault = None

    def _begin(self, number: int, keep: int) -> None:
        vault = self._vault
        if vault is None:
            return
        vault.begin(keep=keep or None)
        contents = self._collect()
        self._taken_at_step = contents.step
        kept, new = [], []
        for vector in contents.vectors:
            part = self._parts.get(vector.key)
            if part is None:
                new.append(vector)
            else:
                kept.append(part.model_copy(update={"name": vector.name}))
        tables: dict[str, Table] = {"hot": table_of(contents.hot.tensors, contents.hot.state)}
        tables |= {vector.name: table_of({VALUES: vector.values}) for vector in new}
        places = vault.reserve([table.num_bytes for table in tables.values()], kept=kept)
        regions = dict(zip(tables, places, strict=True))
        writers = {name: PartWriter(vault.region(regions[name]), table) for name, table in tables.items()}
        for name, tensor in contents.hot.early.items():
            writers["hot"].put(name, tensor)
        sources = {"hot": contents.hot.late} | {vector.name: {VALUES: vector.values} for vector in new}
        self._start(
            Job(
                generation=self._generation(contents, (), number=number),
                writers=[(name, writer, sources[name]) for name, writer in writers.items()],
                regions=regions,
                keys={vector.name: vector.key for vector in contents.vectors},
                kept=kept,
            )
        )

    def _generation(self, contents: Contents, parts: tuple[Part, ...], *, number: int = 1) -> Generation:
        identity = self._identity
        return Generation(
            number=number,
            run_id=identity.run_id,
            instance=identity.instance,
            epoch=contents.epoch,
            slot=identity.slot,
            rank=identity.rank,
            num_ranks=identity.num_ranks,
            step=contents.step,
            tokens=contents.tokens,
            skipped=contents.skipped,
            versions=contents.versions,
            model=identity.model,
            taken_s=time.time(),
            parts=parts,
            state=contents.state,
        )

    def _start(self, job: Job) -> None:
        if self._thread is None:
            # It has the priority of the inner steps: one that is lower could hold Python's lock and not run.
            self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
            self._thread.start()
        self._copied.clear()
        self._job = job
        self._stolen.begin()
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            job, self._job = self._job, None
            if job is None:
                return
            started_s = time.thread_time()
            try:
                self._copy(job)
            except (VaultError, BufferError, MemoryError, RuntimeError, ValueError) as exc:
                self._fail(exc)
            finally:
                self._cost_s = self._stolen.end(cpu_s=time.thread_time() - started_s)
                self._copied.set()

    def _copy(self, job: Job) -> None:
        parts = list(job.kept)
        for name, writer, tensors in job.writers:
            made = writer.finish(tensors)
            is_unique = not name.startswith("global/")
            parts.append(made.model_copy(update={"name": name, "region": job.regions[name], "unique": is_unique}))
        generation = job.generation.model_copy(update={"parts": tuple(parts)})
        assert self._vault is not None
        self._vault.commit(generation)
        self._parts = {job.keys[part.name]: part for part in parts if part.name in job.keys}
        self._known = frozenset(self._parts)
        self.committed, self.committed_step = generation.number, generation.step
        if self.failure:
            self.failure = ""
            self._tell("")

    def _fail(self, exc: Exception) -> None:
        reason = str(exc) if isinstance(exc, VaultError) else f"{type(exc).__name__}: {exc}"
        self._retry_at_step = (self._taken_at_step or 0) + RETRY_STEPS
        if reason != self.failure:
            self.failure = reason
            self._tell(reason)
