"""What a worker says of its syncs, in this process: when they ended, of which command they are, that one was none."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from diloco.inbox import Inbox, TransferThread
from diloco.protocol import EVENTS, Event, SkippedEvent, SyncCommand, SyncedEvent
from diloco.schema import SyncOutcome
from diloco.team import Team
from diloco.worker_lead import Worker
from diloco.worker_shards import open_shards
from tests.diloco.conftest import wait_until
from tests.diloco.worker_configs import tiny_config

SHARE_S = 0.3


class SlowTeam(Team):
    """Ranks that need a while to share parameters, beside which the transfer thread goes on."""

    shared_s = 0.0
    """When they last had."""

    def share(self, module: nn.Module) -> None:
        threading.Event().wait(SHARE_S)
        self.shared_s = time.time()


class Said(io.StringIO):
    """Where the worker writes its events."""

    def events(self) -> list[Event]:
        return [EVENTS.validate_json(line) for line in self.getvalue().splitlines(keepends=True) if line[-1] == "\n"]

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events() if isinstance(event, kind)]


@contextmanager
def training(url: str, corpus: Path, team: Team) -> Iterator[tuple[Inbox, Said]]:
    corpus.write_text("all work and no play makes jack a dull boy. " * 100)
    config = tiny_config(corpus, url, width=16, context=8, data_shards=1, batch_size=2)
    inbox, said = Inbox(), Said()
    with open_shards(config) as shards:
        worker = Worker(
            config, inbox=inbox, transfers=TransferThread(idle=False), events=said, shards=shards, team=team
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield inbox, said
        finally:
            inbox.request_stop()
            thread.join(30)
    assert not thread.is_alive()


def order(inbox: Inbox, **said: object) -> None:
    command = {"epoch": 0, "deadline_s": time.time() + 60, **said}
    inbox.handle(SyncCommand.model_validate(command).model_dump_json())


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapped"])
def test_a_sync_ends_when_all_ranks_have_what_it_brought(
    serve: Callable[..., str], tmp_path: Path, overlap: bool
) -> None:
    team = SlowTeam()
    with training(serve(tmp_path / "run", quorum=1), tmp_path / "corpus.txt", team) as (inbox, said):
        order(inbox, round=0, serial=7, overlap=overlap)
        wait_until(lambda: said.of(SyncedEvent))
        shared_s = team.shared_s
        (event,) = said.of(SyncedEvent)
    assert isinstance(event, SyncedEvent)
    assert event.report.outcome is SyncOutcome.APPLIED
    assert event.serial == 7
    assert event.report.finished_s >= shared_s > event.report.started_s
    assert event.report.kept_from_steps_s >= SHARE_S


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapped"])
def test_a_sync_in_which_there_is_nothing_to_do_is_told_to_the_agent(
    serve: Callable[..., str], tmp_path: Path, overlap: bool
) -> None:
    with training(serve(tmp_path / "run", quorum=1), tmp_path / "corpus.txt", Team()) as (inbox, said):
        order(inbox, round=0, serial=1, overlap=overlap)
        wait_until(lambda: said.of(SyncedEvent))
        order(inbox, round=0, serial=2, overlap=overlap)
        wait_until(lambda: said.of(SkippedEvent))
        assert said.of(SkippedEvent) == [SkippedEvent(serial=2)]
        assert len(said.of(SyncedEvent)) == 1
