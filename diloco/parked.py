"""A parked worker: a spare's, which has done all that can be done before it knows its slot.

Its process is started, everything is imported, the text is read, the model is built in the CPU's memory (on no GPU: it
takes nothing there, not even a context), a tiny one has taken a step, and global parameters are pulled when there are
new ones: at idle priority, at most every ``refresh_s``. When a slot is given, the next line on stdin is the
`WorkerConfig`, and the worker goes on with what is there: a slot whose state is on this host needs no more than to be
copied into the model, one that goes on from global parameters needs none of them that it has already.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TextIO

from pydantic import ValidationError
from torch import nn

from diloco.parked_config import ParkedConfig
from diloco.protocol import ParkedEvent, WorkerConfig
from diloco.scheduling import become_idle, come_back
from diloco.schema import FragmentState
from diloco.shards import Shards
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.warm_up import read_corpus, warm_up
from diloco.workload import Workload
from service.errors import InputError, WadilocoError

logger = logging.getLogger(__name__)

PULL_S = 60.0
"""For one refresh."""
END_S = 0.5
"""For the thread that pulls to see that it is to stop. To build the model anew, after that, takes about as long."""


@dataclass(slots=True)
class Built:
    """What a worker of any slot begins with."""

    workload: Workload[Any]
    module: nn.Module
    island: StreamingIsland
    held: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Of each fragment, version and digest of the global parameters that the island holds."""

    def holds(self, index: int, its: FragmentState) -> bool:
        """Whether the island is at these global parameters of a fragment, with no progress of its own."""
        fragments = self.island.fragments
        is_cut_so = len(self.held) == len(fragments) and fragments[index].version == its.version
        return is_cut_so and self.held.get(index) == (its.version, its.digest)


def first_line(line: str) -> WorkerConfig | ParkedConfig:
    """Raises `ValidationError`: it is neither."""
    try:
        return ParkedConfig.model_validate_json(line)
    except ValidationError:
        return WorkerConfig.model_validate_json(line)


class Refresher:
    """Keeps the global parameters of what is built new, on a thread of its own, at idle priority."""

    def __init__(self, built: Built, shards: Shards, *, every_s: float, tell: Callable[[ParkedEvent], None]) -> None:
        self._built = built
        self._shards = shards
        self._every_s = every_s
        self._tell = tell
        self._ending = threading.Event()
        self._at_work = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="refresh", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """Stop, in the middle of a pull if need be; False when the thread is still at it after a while.

        One that sleeps, or asks whether there is anything new, is not waited for: at idle priority it may be long in
        going on, and then it sees that it is to stop before it changes anything.
        """
        self._ending.set()
        if self._thread.native_id is not None:
            # While it waits for a core it may hold Python's lock, and keep the others from going on.
            come_back(self._thread.native_id)
        self._shards.cancel()
        return self._at_work.acquire(timeout=END_S)

    def _run(self) -> None:
        become_idle()
        while not self._ending.is_set():
            self._refresh()
            # Nobody wakes it: it would take Python's lock as soon as it has a core, which may be long.
            time.sleep(self._every_s)

    def _refresh(self) -> None:
        deadline_s = time.time() + PULL_S
        try:
            if not has_news(self._built, self._shards, deadline_s=deadline_s):
                return
            with self._at_work:
                if self._ending.is_set():
                    return
                pull(self._built, self._shards, deadline_s=deadline_s)
                versions = tuple(version for version, _ in self._built.held.values())
            self._tell(ParkedEvent(versions=versions))
        except WadilocoError as exc:
            # Without a synchronizer there is nobody to pull from: it is tried again.
            logger.debug("global parameters not refreshed error=%s", exc)


def park(
    parked: ParkedConfig,
    lines: TextIO,
    *,
    build: Callable[[WorkerConfig], Built],
    connect: Callable[[WorkerConfig], AbstractContextManager[Shards]],
    tell: Callable[[ParkedEvent], None],
) -> tuple[WorkerConfig, Built] | None:
    """Build all that can be, and wait for a slot; None: the agent is gone, and had no use for it.

    Raises:
        WadilocoError: it cannot be built, or the line that came is no configuration.
    """
    built = build(parked.config)
    warm_up()
    if parked.config.workload is None and parked.config.hf_model is None:
        read_corpus(parked.config.data)
    tell(ParkedEvent())
    if parked.config.rank != 0:
        config = wait_for_slot(lines)  # global parameters come from the first rank
        return None if config is None else (config, built)
    with connect(parked.config) as shards:
        refresher = Refresher(built, shards, every_s=parked.refresh_s, tell=tell)
        config = wait_for_slot(lines)
        has_ended = refresher.end()
    if config is None:
        return None
    # A thread that is still at work on it makes it worthless.
    return config, built if has_ended else build(config)


def wait_for_slot(lines: TextIO) -> WorkerConfig | None:
    """The configuration with which a parked worker goes on; None at the end of ``lines``: the agent is gone.

    Raises:
        InputError: the line is none.
    """
    line = lines.readline()
    if not line or '"command"' in line:
        return None  # the only command that makes sense here is to stop
    try:
        return WorkerConfig.model_validate_json(line)
    except ValidationError as exc:
        raise InputError(f"worker configuration: {exc}", field="worker") from exc


def has_news(built: Built, shards: Shards, *, deadline_s: float) -> bool:
    """Whether the run has other global parameters than the island holds; changes nothing.

    Raises:
        WadilocoError: a synchronizer cannot be reached.
    """
    look = shards.look_at_all(deadline_s=deadline_s)
    if not look.all_begun:
        return False
    return len(built.held) != len(look.fragments) or not all(built.holds(*each) for each in look.fragments.items())


def pull(built: Built, shards: Shards, *, deadline_s: float) -> None:
    """Let the island hold the newest global parameters.

    Raises:
        WadilocoError: a synchronizer cannot be reached, or its run is of another model.
    """
    exchange = StreamingExchange(built.island, shards, slot=0)
    exchange.join(deadline_s=deadline_s, holds=built.holds)
    built.held = {}
    pulled = shards.look_at_all(deadline_s=deadline_s).fragments
    for index, fragment in enumerate(built.island.fragments):
        its = pulled.get(index)
        # Otherwise the next one came meanwhile, and nobody knows what this one was.
        if its is not None and fragment.version == its.version:
            built.held[index] = (its.version, its.digest)
