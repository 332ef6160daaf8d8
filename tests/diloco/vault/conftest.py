"""Rank workers as processes with a vault, for which the test stands in as their agent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco.protocol import (
    Event,
    ReadyEvent,
    RestoredEvent,
    SyncCommand,
    VaultCommand,
    VaultNeedEvent,
    VaultPlace,
    WorkerConfig,
)
from diloco.schema import OuterState
from diloco.vault.file import VaultFile
from diloco.vault.layout import RegionNeed
from tests.diloco.conftest import wait_until
from tests.diloco.test_worker import WorkerUnderTest
from tests.diloco.worker_configs import tiny_config, write_corpus

DEADLINE_S = 90.0


class Slot:
    """One slot's worker and vault, over as many lives as the test takes it."""

    def __init__(self, config: WorkerConfig, directory: Path) -> None:
        self._config = config
        self.path = directory / f"slot-{config.slot}-rank-{config.rank}.vault"
        self._vault: VaultFile | None = None
        self.commands: list[SyncCommand] = []
        self.worker = self._start(None)
        self.workers = [self.worker]

    def begin_again(self, **place: Any) -> None:
        """Start the next life, which is ready when the other ranks are."""
        first_number = self.vault.newest_number()
        known = {"path": self.path, "first_number": first_number, "epoch": 1}
        self.worker = self._start(VaultPlace(**(known | place)))
        self.workers.append(self.worker)

    def plan(self, *commands: SyncCommand) -> None:
        """Syncs that are still to come; the next life hears of those that have not ended."""
        self.commands += commands
        for command in commands:
            self.worker.send(command)

    def wait_ready(self) -> ReadyEvent:
        return self.worker.wait_for(ReadyEvent)

    def train(self) -> None:
        """Answer the first life's question for a vault."""
        need = self.worker.wait_for(VaultNeedEvent)
        needs = [RegionNeed(each.num_bytes, each.count) for each in need.regions]
        self._vault = VaultFile.create(self.path, needs, record_bytes=need.record_bytes)
        self.worker.send(VaultCommand(path=self.path))

    @property
    def vault(self) -> VaultFile:
        assert self._vault is not None
        return self._vault

    def step(self) -> int:
        """Of the newest generation."""
        generations = self.vault.generations()
        return generations[0].step if generations else 0

    def until_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step, timeout_s=DEADLINE_S)

    def kill(self) -> None:
        os.kill(self.worker.process.pid, signal.SIGKILL)
        self.worker.finish()

    def change(self, **config: Any) -> None:
        """How the next life is started."""
        self._config = self._config.model_copy(update=config)

    def restart(self, **place: Any) -> RestoredEvent:
        """Start the next life, and tell it what syncs are to come, as its agent does."""
        self.begin_again(**place)
        return self.hear_again()

    def hear_again(self) -> RestoredEvent:
        """Wait until it goes on, and tell it what syncs are to come."""
        ready = self.wait_ready()
        done = ready.version + ready.resumes_sync
        for command in self.commands:
            if command.round is not None and command.round >= done:
                self.worker.send(command)
        return self.worker.wait_for(RestoredEvent)

    def _start(self, place: VaultPlace | None) -> WorkerUnderTest:
        return WorkerUnderTest(self._config.model_copy(update={"vault": place or VaultPlace()}))

    def events(self, kind: type[Event]) -> list[Any]:
        return [e for worker in self.workers for e in worker.events if isinstance(e, kind)]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        if self._vault is not None:
            self._vault.close(remove=True)


StartSlot = Callable[..., Slot]


@pytest.fixture
def start_slot(tmp_path: Path) -> Iterator[StartSlot]:
    """Starts a tiny worker."""
    corpus = write_corpus(tmp_path)
    running: list[Slot] = []

    def begin(url: str, *, name: str = "a", **overrides: Any) -> Slot:
        config = tiny_config(corpus, url, **overrides)
        directory = tmp_path / f"vault-{name}"
        directory.mkdir()
        running.append(Slot(config, directory))
        return running[-1]

    yield begin
    for slot in running:
        slot.close()


def outer_state(url: str) -> OuterState:
    return OuterState.model_validate_json(httpx.get(f"{url}/v1/state", timeout=120, trust_env=False).content)


def until_version(url: str, version: int) -> list[str]:
    """Digests of all fragments, once outer steps have been taken so often on all together."""

    def reached() -> bool:
        return sum(fragment.version for fragment in outer_state(url).fragments) >= version

    wait_until(reached, timeout_s=DEADLINE_S)
    return [fragment.digest for fragment in outer_state(url).fragments]


def syncs_at(*steps: int, overlap_steps: int | None = None, deadline_in_s: float = 300.0) -> list[SyncCommand]:
    """Sync k at the k-th of these steps."""
    return [
        SyncCommand(
            round=number,
            epoch=1,
            at_step=step,
            overlap=overlap_steps is not None,
            overlap_steps=overlap_steps,
            deadline_s=time.time() + deadline_in_s,
        )
        for number, step in enumerate(steps)
    ]
