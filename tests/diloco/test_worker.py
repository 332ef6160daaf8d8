"""The rank worker as a real process, against a real synchronizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from pydantic import SecretStr

from diloco.codec import CODECS
from diloco.protocol import (
    EVENTS,
    Command,
    Event,
    FailedEvent,
    PauseCommand,
    ProgressEvent,
    ReadyEvent,
    ResumeCommand,
    StopCommand,
    SyncCommand,
    SyncedEvent,
    WorkerConfig,
)
from diloco.schema import Phase, Progress, SyncOutcome, SyncReport
from diloco.transport import SynchronizerClient
from sidecar.calibrator import Phase as ServerPhase
from sidecar.trainers import TrainerWatch
from sidecar.vllm_plugin.gate_writer import GateWriter, Heartbeat
from sidecar.vllm_plugin.records import SlotFlag
from tests.diloco.conftest import wait_until
from tests.diloco.worker_configs import tiny_config, write_corpus

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
E = TypeVar("E")
Serve = Callable[..., str]


class WorkerUnderTest:
    """A worker process and everything that it said."""

    def __init__(self, config: WorkerConfig) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diloco.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self.events: list[Event] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._write(config.model_dump_json())

    def send(self, command: Command) -> None:
        self._write(command.model_dump_json())

    def wait_for(self, kind: type[E], accept: Callable[[E], bool] = lambda _: True, *, after: int = 0) -> E:
        """The first event of that kind, after the first ``after`` events, that ``accept`` likes."""

        def find() -> E | None:
            return next((e for e in self.events[after:] if isinstance(e, kind) and accept(e)), None)

        with self._arrived:
            assert self._arrived.wait_for(lambda: find() is not None, DEADLINE_S), self.events[-3:]
            found = find()
        assert found is not None
        return found

    def progress(self, accept: Callable[[Progress], bool]) -> Progress:
        return self.wait_for(ProgressEvent, lambda event: accept(event.progress), after=len(self.events)).progress

    def sync(self, round_number: int | None, *, deadline_in_s: float = DEADLINE_S) -> SyncReport:
        seen = len(self.events)
        self.send(SyncCommand(round=round_number, epoch=1, deadline_s=time.time() + deadline_in_s))
        return self.wait_for(SyncedEvent, after=seen).report

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()

    def finish(self, timeout_s: float = 15.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.finish()
        self.hang_up()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                self.events.append(EVENTS.validate_json(line))
                self._arrived.notify_all()


Start = Callable[..., WorkerUnderTest]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    corpus = write_corpus(tmp_path)
    running: list[WorkerUnderTest] = []

    def begin(url: str, **overrides: Any) -> WorkerUnderTest:
        config = tiny_config(corpus, url, **overrides)
        running.append(WorkerUnderTest(config))
        return running[-1]

    yield begin
    for worker in running:
        worker.close()


def test_a_worker_offers_its_parameters_trains_syncs_and_stops(serve: Serve, start: Start, tmp_path: Path) -> None:
    worker = start(serve(tmp_path / "sync", quorum=1))
    ready = worker.wait_for(ReadyEvent)
    assert ready.version == 0
    first = worker.progress(lambda p: p.step > 20)
    assert first.loss is not None
    report = worker.sync(0)
    assert report.outcome is SyncOutcome.APPLIED
    assert (report.round, report.bytes_pushed, report.bytes_pulled) == (0, *[4 * ready.num_parameters] * 2)
    assert report.pushed_s is not None
    assert report.started_s <= report.pushed_s <= report.finished_s
    later = worker.progress(lambda p: p.round == 1 and p.step > first.step + 100)
    assert later.loss is not None
    assert later.loss < first.loss
    assert later.inner_steps_since_sync < later.step
    worker.send(StopCommand())
    assert worker.finish() == 0
    last = [event.progress for event in worker.events if isinstance(event, ProgressEvent)][-1]
    assert last.phase is Phase.STOPPED
    assert last.step >= later.step


def test_two_workers_wait_for_each_other(
    serve: Serve, start: Start, connect: Callable[[str], SynchronizerClient], tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=2)
    workers = [start(url, slot=slot) for slot in range(2)]
    for worker in workers:
        worker.wait_for(ReadyEvent)
        worker.progress(lambda p: p.step > 5)
    for worker in workers:
        worker.send(SyncCommand(round=0, epoch=1, deadline_s=time.time() + DEADLINE_S))
    reports = [worker.wait_for(SyncedEvent).report for worker in workers]
    assert [report.outcome for report in reports] == [SyncOutcome.APPLIED] * 2
    assert [report.round for report in reports] == [0, 0]
    assert max(report.started_s for report in reports) <= min(report.finished_s for report in reports)
    assert connect(url).state(deadline_s=time.time() + 10).fragments[0].version == 1


def test_a_round_that_outlives_the_deadline_is_adopted_by_a_later_sync(
    serve: Serve, start: Start, connect: Callable[[str], SynchronizerClient], tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=2)
    worker = start(url)
    worker.wait_for(ReadyEvent)
    worker.progress(lambda p: p.step > 5)
    failed = worker.sync(0, deadline_in_s=1.0)
    assert (failed.outcome, failed.detail) == (SyncOutcome.FAILED, "round still open at the deadline")
    assert failed.pushed_s is not None
    # Another island closes the round, with the contribution that was already there.
    size = failed.bytes_pushed // 4
    connect(url).push(torch.zeros(size), round=0, slot=1, epoch=1, tokens=10, deadline_s=time.time() + 10)
    before = worker.progress(lambda p: p.inner_steps_since_sync > failed.inner_steps)
    applied = worker.sync(0)
    assert (applied.outcome, applied.round, applied.inner_steps) == (SyncOutcome.APPLIED, 0, failed.inner_steps)
    assert applied.bytes_pushed == 0
    after = worker.progress(lambda p: p.round == 1)
    assert after.inner_steps_since_sync >= before.inner_steps_since_sync - failed.inner_steps


def test_a_worker_trains_on_while_the_round_that_it_is_in_is_open(
    serve: Serve, start: Start, connect: Callable[[str], SynchronizerClient], tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=2)
    worker = start(url)
    ready = worker.wait_for(ReadyEvent)
    worker.progress(lambda p: p.step > 5)
    client = connect(url)

    def slots() -> tuple[int, ...]:
        return client.state(deadline_s=time.time() + 10).fragments[0].open_round.slots

    seen = len(worker.events)
    worker.send(SyncCommand(round=0, epoch=1, deadline_s=time.time() + DEADLINE_S, overlap=True))
    wait_until(lambda: slots() == (0,))
    begun = worker.progress(lambda p: p.phase is Phase.INNER)
    on = worker.progress(lambda p: p.step > begun.step + 20)
    assert (on.round, slots()) == (0, (0,))
    # An order that comes meanwhile waits for the end of this one; a pause does not.
    worker.send(SyncCommand(round=1, epoch=1, deadline_s=time.time() + 1.0))
    worker.send(PauseCommand())
    paused = worker.progress(lambda p: p.phase is Phase.PAUSED)
    worker.send(ResumeCommand())
    worker.progress(lambda p: p.step > paused.step)
    client.push(torch.zeros(ready.num_parameters), round=0, slot=1, epoch=1, tokens=10, deadline_s=time.time() + 10)
    report = worker.wait_for(SyncedEvent, after=seen).report
    assert (report.outcome, report.round) == (SyncOutcome.APPLIED, 0)
    assert report.inner_steps < on.step
    assert report.blocked_s is not None
    assert report.blocked_s < report.finished_s - report.started_s
    after = worker.progress(lambda p: p.round == 1)
    assert after.inner_steps_since_sync >= on.step - report.inner_steps
    assert worker.wait_for(SyncedEvent, lambda event: event.report.round == 1).report.outcome is SyncOutcome.FAILED


def test_progress_that_comes_late_is_kept_for_the_next_round(
    serve: Serve, start: Start, connect: Callable[[str], SynchronizerClient], tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    worker = start(url)
    ready = worker.wait_for(ReadyEvent)
    worker.progress(lambda p: p.step > 5)
    zeros = torch.zeros(ready.num_parameters)
    connect(url).push(zeros, round=0, slot=1, epoch=1, tokens=10, deadline_s=time.time() + 10)
    connect(url).wait_version(0, deadline_s=time.time() + 10)
    # Its round is over; the progress goes into the round that is open now.
    report = worker.sync(None)
    assert (report.outcome, report.round) == (SyncOutcome.APPLIED, 1)
    assert report.inner_steps > 5


def test_a_sync_without_synchronizer_fails_at_its_deadline_and_training_goes_on(
    spawn: Callable[..., Any], start: Start, tmp_path: Path
) -> None:
    synchronizer = spawn(tmp_path / "sync")
    worker = start(synchronizer.url)
    worker.wait_for(ReadyEvent)
    synchronizer.kill()
    report = worker.sync(0, deadline_in_s=1.0)
    assert report.outcome is SyncOutcome.FAILED
    assert report.pushed_s is None
    went_on = worker.progress(lambda p: p.inner_steps_since_sync > report.inner_steps and p.step > 5)
    synchronizer.start()
    recovered = worker.sync(0)
    assert recovered.outcome is SyncOutcome.APPLIED
    assert recovered.inner_steps >= went_on.inner_steps_since_sync


def test_a_worker_waits_for_the_synchronizer_at_its_start(
    spawn: Callable[..., Any], start: Start, tmp_path: Path
) -> None:
    synchronizer = spawn(tmp_path / "sync")
    synchronizer.kill()
    worker = start(synchronizer.url)
    worker.wait_for(ProgressEvent)
    synchronizer.start()
    worker.wait_for(ReadyEvent)


def test_a_restarted_worker_takes_global_parameters_and_its_place_in_the_data(
    serve: Serve, start: Start, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    first = start(url)
    first.wait_for(ReadyEvent)
    first.progress(lambda p: p.step > 20)
    first.sync(0)
    first.process.kill()
    second = start(url, start_step=20, start_tokens=1280, start_skipped=2)
    assert second.wait_for(ReadyEvent).version == 1
    beginning = second.wait_for(ProgressEvent).progress
    assert (beginning.step, beginning.tokens, beginning.skipped_steps) == (20, 1280, 2)
    assert second.progress(lambda p: p.step > 25).round == 1


def test_a_worker_with_a_codec_pushes_encoded_bytes_and_owes_what_it_left_out(
    serve: Serve, start: Start, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync", quorum=1)
    first = start(url, codec="int4")
    ready = first.wait_for(ReadyEvent)
    first.progress(lambda p: p.step > 5 and p.residual_norm == 0.0)
    report = first.sync(0)
    assert report.outcome is SyncOutcome.APPLIED
    assert report.bytes_pushed == CODECS["int4"].num_bytes(ready.num_parameters)
    assert report.bytes_pulled == 4 * ready.num_parameters
    owing = first.progress(lambda p: p.round == 1)
    assert owing.residual_norm is not None
    assert report.update_norm is not None
    assert 0 < owing.residual_norm < report.update_norm
    first.process.kill()
    second = start(url, codec="int4", start_step=20)
    assert second.wait_for(ProgressEvent).progress.residual_norm == 0.0
    plain = start(url, slot=1)
    assert plain.wait_for(ProgressEvent).progress.residual_norm is None


def test_pause_holds_the_inner_steps_and_resume_continues_them(serve: Serve, start: Start, tmp_path: Path) -> None:
    worker = start(serve(tmp_path / "sync"))
    worker.progress(lambda p: p.step > 5)
    worker.send(PauseCommand())
    paused = worker.progress(lambda p: p.phase is Phase.PAUSED)
    assert worker.progress(lambda p: p.phase is Phase.PAUSED).step == paused.step
    assert worker.sync(0).outcome is SyncOutcome.APPLIED
    worker.send(ResumeCommand())
    worker.progress(lambda p: p.phase is Phase.INNER and p.step > paused.step)


def test_garbage_on_the_command_pipe_is_ignored(serve: Serve, start: Start, tmp_path: Path) -> None:
    worker = start(serve(tmp_path / "sync"))
    for line in ("", "nonsense", "{}", '{"command": "dance"}', json.dumps({"command": "sync"})):
        worker._write(line)
    step = worker.progress(lambda p: p.step > 0).step
    worker.progress(lambda p: p.step > step)


def test_a_worker_whose_agent_is_gone_ends(serve: Serve, start: Start, tmp_path: Path) -> None:
    worker = start(serve(tmp_path / "sync", quorum=2))
    worker.progress(lambda p: p.step > 5)
    # In the middle of a round that will not close.
    worker.send(SyncCommand(round=0, epoch=1, deadline_s=time.time() + 600))
    worker.progress(lambda p: p.phase is Phase.SYNC)
    worker.hang_up()
    assert worker.finish(8.0) == 0


def test_sigterm_ends_a_worker_cleanly(serve: Serve, start: Start, tmp_path: Path) -> None:
    worker = start(serve(tmp_path / "sync"))
    worker.progress(lambda p: p.step > 5)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.finish() == 0


def test_the_token_is_sent_and_a_wrong_one_ends_the_worker(serve: Serve, start: Start, tmp_path: Path) -> None:
    url = serve(tmp_path / "sync", token=SecretStr("open sesame"))
    start(url, token=SecretStr("open sesame")).wait_for(ReadyEvent)
    refused = start(url, token=SecretStr("open barley"))
    assert "token" in refused.wait_for(FailedEvent).message
    assert refused.finish() == 2


def test_a_missing_data_path_is_named(start: Start, tmp_path: Path) -> None:
    worker = start("http://127.0.0.1:1", data=(tmp_path / "nowhere",))
    assert "nowhere does not exist" in worker.wait_for(FailedEvent).message
    assert worker.finish() == 2


def test_another_model_than_the_run_is_refused_by_its_first_difference(
    serve: Serve, start: Start, tmp_path: Path
) -> None:
    url = serve(tmp_path / "sync")
    start(url).wait_for(ReadyEvent)
    other = start(url, width=64)
    failure = other.wait_for(FailedEvent)
    assert "[64]" in failure.message
    assert failure.exit_code == other.finish() == 4


OWN = {"workload": "examples.own_model.spirals:make", "workload_options": {"width": "512", "batch_size": "256"}}


@pytest.mark.parametrize("workload", [{}, OWN], ids=["built-in", "own"])
def test_a_worker_behind_a_closed_gate_waits_and_still_obeys(
    serve: Serve, start: Start, tmp_path: Path, workload: dict[str, Any]
) -> None:
    gate = GateWriter(tmp_path / "gate", SlotFlag.INGRESS)
    heartbeat = Heartbeat()
    heartbeat.add(gate.beat)
    worker = start(serve(tmp_path / "sync", quorum=1), gate=tmp_path / "gate", **workload)
    worker.progress(lambda p: p.step > 5 and p.yielded_s is not None)
    gate.update(in_flight=1)
    held = worker.progress(lambda p: p.yield_reason == "in_flight")
    assert worker.progress(lambda p: (p.yielded_s or 0.0) > 1.0).step == held.step
    assert worker.sync(0).outcome is SyncOutcome.APPLIED
    worker.send(PauseCommand())
    worker.progress(lambda p: p.phase is Phase.PAUSED and p.step == held.step)
    worker.send(ResumeCommand())
    worker.progress(lambda p: p.yield_reason == "in_flight" and p.step == held.step)
    gate.update(in_flight=0)
    worker.progress(lambda p: p.step > held.step + 5 and p.yield_reason is None)
    gate.update(in_flight=1)
    worker.progress(lambda p: p.yield_reason == "in_flight")
    worker.send(StopCommand())
    assert worker.finish() == 0
    heartbeat.stop()
    gate.close()


def test_the_sidecar_sees_what_a_worker_does(serve: Serve, start: Start, tmp_path: Path) -> None:
    gate = GateWriter(tmp_path / "gate", SlotFlag.INGRESS)
    heartbeat = Heartbeat()
    heartbeat.add(gate.beat)
    watch = TrainerWatch(tmp_path / "gate", now_ns=time.monotonic_ns())

    def sees(phase: ServerPhase) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            threading.Event().wait(0.3)
            watch.poll(time.monotonic_ns())
            if (taken := watch.take()) is phase:
                return
            assert time.monotonic() < deadline_s, f"{taken}, not {phase}"

    worker = start(serve(tmp_path / "sync", quorum=2), gate=tmp_path / "gate")
    sees(ServerPhase.INNER)
    gate.update(in_flight=1)
    sees(ServerPhase.NONE)
    gate.update(in_flight=0)
    # The round does not close, for there is no other island.
    worker.send(SyncCommand(round=0, epoch=1, deadline_s=time.time() + 1.0))
    sees(ServerPhase.SYNC)
    sees(ServerPhase.INNER)
    worker.send(PauseCommand())
    sees(ServerPhase.NONE)
    assert watch.status().num_trainers == 1
    assert 0.8 <= watch.total_s[ServerPhase.SYNC] < 1.0 + DEADLINE_S
    worker.send(StopCommand())
    assert worker.finish() == 0
    assert not list((tmp_path / "gate").glob("trainer-*"))
    heartbeat.stop()
    gate.close()


def test_a_worker_whose_gate_nobody_writes_goes_on_at_a_trickle(serve: Serve, start: Start, tmp_path: Path) -> None:
    worker = start(serve(tmp_path / "sync", quorum=1), gate=tmp_path / "gate", gate_patience_s=0.5, gate_trickle_s=0.2)
    worker.wait_for(ReadyEvent)
    worker.progress(lambda p: p.yield_reason == "no_file")
    last = worker.progress(lambda p: p.step >= 5)
    assert last.yielded_s is not None
    assert last.yielded_s > 0.5 + 4 * 0.2 - 0.1
