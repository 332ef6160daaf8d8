"""``wadiloco calibrate`` on real journals and state files, and a sidecar that begins with its result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import wadiloco
from controller.journal import Journal
from replay.loadgen import RequestResult, Status
from replay.requests_file import REQUESTS, write_requests
from replay.summary import Budget, SloSpec, Summary, write_json
from sidecar.app import create_app
from sidecar.calibration_file import CalibrationFile
from sidecar.calibrator import Calibrator, Phase
from sidecar.config import SidecarSettings
from sidecar.learned import write_learned
from sidecar.observer import Observer
from sidecar.schema import EngineState, LoadSample

pytestmark = pytest.mark.usefixtures("root_logging")

RATES = {Phase.NONE: 0.02, Phase.INNER: 0.1, Phase.SYNC: 0.5}


def write_journal(path: Path, *, num: int = 600, server_id: str = "server-0") -> None:
    """Samples of a server whose violations depend on the phase alone."""
    rng, journal = random.Random(1), Journal(path)
    for number in range(num):
        phase = rng.choice(list(Phase))
        requests = rng.randint(0, 6)
        sample = LoadSample(
            server_id=server_id,
            node="host",
            t_s=1000.0 + number,
            interval_s=1.0 if number else None,
            state=EngineState.READY,
            running=rng.randint(0, 6),
            waiting=0,
            slo_requests=requests,
            slo_violations=sum(rng.random() < RATES[phase] for _ in range(requests)),
            trainer_phase=phase.value,
        )
        journal.append("samples", (server_id, sample.t_s, sample.model_dump_json(exclude_none=True)))
    asyncio.run(journal.commit())
    journal.close()


def write_replay(directory: Path, *, threshold_ms: float = 300.0, runs: int = 2) -> Path:
    for number in range(runs):
        run = directory / "runs" / f"run-{number}"
        run.mkdir(parents=True)
        write_journal(run / "journal.sqlite")
    directory.mkdir(exist_ok=True)
    summary = Summary(
        trace="t",
        slo=SloSpec(metric="e2e", threshold_ms=threshold_ms),
        budget=Budget(outer_syncs=1, min_gap_s=1.0),
        runs=[],
        comparisons=[],
        gap_closed={},
    )
    write_json(summary, directory / "summary.json")
    return directory


def request(sent_s: float, e2e_s: float) -> RequestResult:
    return RequestResult(
        index=0,
        server_index=0,
        arrival_s=sent_s,
        sent_s=sent_s,
        ended_s=sent_s + e2e_s,
        sent_unix_s=1e9 + sent_s,
        ended_unix_s=1e9 + sent_s + e2e_s,
        status=Status.OK,
        ttft_s=0.05,
        e2e_s=e2e_s,
    )


def write_state(path: Path, *, slo: str = "e2e:300ms", server: str = "http://127.0.0.1:8000") -> Path:
    observer = Observer(SidecarSettings(vllm=server, slo=slo), t_s=0.0, monotonic_s=0.0)
    observer.calibrator.observe(load=2, phase=Phase.SYNC, requests=100, violations=40)
    write_learned(path, observer.export(t_s=1.0))
    return path


@pytest.fixture
def calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = wadiloco.main(["calibrate", "--out", str(tmp_path / "out.json"), *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


Run = Callable[..., tuple[int, str, str]]


def test_a_replay_becomes_a_calibration_that_a_sidecar_begins_with(calibrate: Run, tmp_path: Path) -> None:
    code, printed, _ = calibrate("--replay", write_replay(tmp_path / "out"))
    assert code == 0
    for phase in Phase:
        assert f"{phase}: " in printed
    content = CalibrationFile.model_validate_json((tmp_path / "out.json").read_text())
    assert content.slo == "e2e:300ms"
    assert [source.kind for source in content.sources] == ["journal", "journal"]
    settings = SidecarSettings(vllm="http://127.0.0.1:8000", slo="e2e:0.3s", calibration=tmp_path / "out.json")
    calibrator = create_app(settings).state.sidecar.observer.calibrator
    for phase, rate in RATES.items():
        estimate = calibrator.probability(3.0, phase)
        assert estimate.low <= rate <= estimate.high
    assert calibrator.probability(3.0, Phase.SYNC).low > calibrator.probability(3.0, Phase.NONE).high


def test_the_result_for_machines(calibrate: Run, tmp_path: Path) -> None:
    code, printed, _ = calibrate("--replay", write_replay(tmp_path / "out", runs=1), "--json")
    document = json.loads(printed)
    assert (code, document["slo"], document["too_few"]) == (0, "e2e:300ms", [])
    assert set(document["phases"]) == {"none", "inner", "sync"}
    for bins in document["phases"].values():
        assert [bin_["probability"] for bin_ in bins] == sorted(bin_["probability"] for bin_ in bins)


def test_a_phase_with_few_requests_is_said_to_be_assumed(calibrate: Run, tmp_path: Path) -> None:
    code, printed, _ = calibrate("--state-file", write_state(tmp_path / "state.json"))
    assert code == 0
    assert "none: too few requests" in printed
    assert "sync: too few requests" not in printed


def test_a_run_without_training_tells_of_phase_none(calibrate: Run, tmp_path: Path) -> None:
    directory = write_replay(tmp_path / "replay", runs=1)
    write_requests(
        directory / "runs" / "no_training", [request(0.1 * i, 0.4 if i % 4 == 0 else 0.1) for i in range(400)]
    )
    assert calibrate("--replay", directory, "--json")[0] == 0
    content = CalibrationFile.model_validate_json((tmp_path / "out.json").read_text())
    assert {source.kind: source.requests for source in content.sources}["requests"] == 400
    write_replay(tmp_path / "alone", runs=0)
    write_requests(tmp_path / "alone" / "runs" / "no_training", [request(0.1 * i, 0.4) for i in range(400)])
    assert calibrate("--replay", tmp_path / "alone")[0] == 0
    alone = CalibrationFile.model_validate_json((tmp_path / "out.json").read_text()).calibration
    assert sum(alone.violations[Phase.NONE]) == sum(alone.requests[Phase.NONE]) == pytest.approx(400, rel=0.01)
    assert sum(alone.requests[Phase.INNER]) == 0


def test_states_and_journals_add_up(calibrate: Run, tmp_path: Path) -> None:
    states = [write_state(tmp_path / f"{name}.json") for name in "ab"]
    write_journal(tmp_path / "journal.sqlite")
    arguments = [part for path in states for part in ("--state-file", path)]
    calibrate(*arguments, "--journal", tmp_path / "journal.sqlite")
    content = CalibrationFile.model_validate_json((tmp_path / "out.json").read_text())
    requests = sum(sum(counts) for counts in content.calibration.requests.values())
    assert requests == pytest.approx(sum(source.requests for source in content.sources), rel=0.1)
    assert content.sources[0].requests == 100


def test_one_server_can_be_picked(calibrate: Run, tmp_path: Path) -> None:
    write_journal(tmp_path / "journal.sqlite")
    arguments = ("--journal", tmp_path / "journal.sqlite", "--slo", "e2e:1s", "--server-id")
    assert calibrate(*arguments, "server-0")[0] == 0
    code, _, error = calibrate(*arguments, "server-1")
    assert code == 2
    assert error == "wadiloco calibrate: server_id: no sample is about server server-1 (name one of server-0)\n"


def no_input(_: Path) -> list[object]:
    return []


def no_replay(path: Path) -> list[object]:
    return ["--replay", path]


def no_runs(path: Path) -> list[object]:
    return ["--replay", write_replay(path / "replay", runs=0)]


def no_requests(path: Path) -> list[object]:
    directory = write_replay(path / "replay", runs=0)
    (directory / "runs" / "no_training-seed0-draw0").mkdir(parents=True)
    (directory / "runs" / "no_training-seed0-draw0" / REQUESTS).write_text("{}\n")
    return ["--replay", directory]


def two_objectives(path: Path) -> list[object]:
    return ["--replay", write_replay(path / "replay", runs=1), "--state-file", write_state(path / "s", slo="e2e:1s")]


def other_objective(path: Path) -> list[object]:
    return ["--slo", "ttft:1s", "--state-file", write_state(path / "s")]


def no_objective(path: Path) -> list[object]:
    write_journal(path / "journal.sqlite", num=10)
    return ["--journal", path / "journal.sqlite"]


def nothing_judged(path: Path) -> list[object]:
    write_journal(path / "journal.sqlite", num=1)
    return ["--slo", "e2e:1s", "--journal", path / "journal.sqlite"]


def no_journal(path: Path) -> list[object]:
    (path / "file").write_text("something else")
    return ["--slo", "e2e:1s", "--journal", path / "file"]


def missing_journal(path: Path) -> list[object]:
    return ["--slo", "e2e:1s", "--journal", path / "nowhere"]


def no_state(path: Path) -> list[object]:
    (path / "file").write_text("{}")
    return ["--state-file", path / "file"]


def state_of_another(path: Path) -> list[object]:
    return ["--state-file", write_state(path / "s"), "--server-id", "elsewhere"]


def replay_with(path: Path, file: str) -> Path:
    run = write_replay(path / "replay", runs=0) / "runs" / "no_training-seed0-draw0"
    run.mkdir(parents=True)
    return run / file


def requests_pipe(path: Path) -> list[object]:
    os.mkfifo(replay_with(path, REQUESTS))
    return ["--replay", path / "replay"]


def summary_pipe(path: Path) -> list[object]:
    os.mkfifo(path / "summary.json")
    return ["--replay", path]


def journal_pipe(path: Path) -> list[object]:
    os.mkfifo(path / "pipe")
    return ["--slo", "e2e:1s", "--journal", path / "pipe"]


def journal_beside_pipe(path: Path) -> list[object]:
    write_journal(path / "journal.sqlite", num=10)
    (path / "journal.sqlite-wal").unlink(missing_ok=True)
    os.mkfifo(path / "journal.sqlite-wal")
    return ["--slo", "e2e:1s", "--journal", path / "journal.sqlite"]


def state_pipe(path: Path) -> list[object]:
    os.mkfifo(path / "pipe")
    return ["--state-file", path / "pipe"]


def state_device(_: Path) -> list[object]:
    return ["--state-file", "/dev/zero"]


def out_device(_: Path) -> list[object]:
    return ["--out", "/dev/full"]


def out_folder(path: Path) -> list[object]:
    return ["--out", path]


ENDLESS = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT"


def endless_samples(path: Path) -> list[object]:
    return journal_changed(path, f"DROP TABLE samples; CREATE VIEW samples AS {ENDLESS} id, 'x' AS body FROM n")


def endless_rounds(path: Path) -> list[object]:
    return journal_changed(path, f"DROP TABLE rounds; CREATE VIEW rounds AS {ENDLESS} id AS key, 'x' AS body FROM n")


def virtual_samples(path: Path) -> list[object]:
    return journal_changed(path, "DROP TABLE samples; CREATE VIRTUAL TABLE samples USING fts5(id, body)")


def computed_samples(path: Path) -> list[object]:
    table = "CREATE TABLE samples (id INTEGER PRIMARY KEY, body AS (hex(zeroblob(8000000))))"
    return journal_changed(path, f"DROP TABLE samples; {table}")


def samples_named_by_text(path: Path) -> list[object]:
    return journal_changed(
        path, "DROP TABLE samples; CREATE TABLE samples (id, body); INSERT INTO samples VALUES ('a', 'b')"
    )


def journal_changed(path: Path, statements: str) -> list[object]:
    write_journal(path / "journal.sqlite", num=10)
    with contextlib.closing(sqlite3.connect(path / "journal.sqlite")) as connection:
        connection.executescript(statements)
    return ["--slo", "e2e:1s", "--journal", path / "journal.sqlite"]


def wrong_slo(_: Path) -> list[object]:
    return ["--slo", "fast"]


@pytest.mark.parametrize(
    ("prepare", "field", "remedy"),
    [
        (no_input, "replay", "give --replay DIR"),
        (no_replay, "replay", "--out folder"),
        (no_runs, "replay", "--out folder"),
        (no_requests, "replay", "a line that is no request"),
        (two_objectives, "slo", "each on its own"),
        (other_objective, "slo", "each on its own"),
        (no_objective, "slo", "set --slo"),
        (nothing_judged, "journal", "under traffic"),
        (no_journal, "journal", "give the --journal file"),
        (missing_journal, "journal", "give the --journal file"),
        (no_state, "state_file", "state file"),
        (state_of_another, "state_file", "--server-id"),
        (wrong_slo, "slo", "set --slo"),
        (requests_pipe, "replay", "not a regular file"),
        (summary_pipe, "replay", "not a regular file"),
        (journal_pipe, "journal", "not a regular file"),
        (journal_beside_pipe, "journal", "not a regular file"),
        (state_pipe, "state_file", "not a regular file"),
        (state_device, "state_file", "not a regular file"),
        (out_device, "out", "not a regular file"),
        (out_folder, "out", "Is a directory"),
        (endless_samples, "journal", "no table samples"),
        (endless_rounds, "journal", "no table rounds"),
        (virtual_samples, "journal", "no table samples"),
        (computed_samples, "journal", "no table samples"),
        (samples_named_by_text, "journal", "not in the order"),
    ],
)
def test_what_cannot_work_names_field_and_remedy(
    calibrate: Run, tmp_path: Path, prepare: Callable[[Path], list[object]], field: str, remedy: str
) -> None:
    code, printed, error = calibrate(*prepare(tmp_path))
    assert (code, printed) == (2, "")
    assert error.startswith(f"wadiloco calibrate: {field}: ")
    assert remedy in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_a_folder_that_cannot_be_written_is_named(calibrate: Run, tmp_path: Path) -> None:
    state = write_state(tmp_path / "state.json")
    code, _, error = calibrate("--state-file", state, "--out", tmp_path / "nowhere" / "out.json")
    assert code == 3
    assert error.startswith("wadiloco calibrate: out: cannot write")


def test_recorded_counts_weigh_only_so_much(calibrate: Run, tmp_path: Path) -> None:
    calibrator = Calibrator()
    calibrator.observe(load=2, phase=Phase.NONE, requests=1_000_000, violations=100_000)
    began = Calibrator()
    began.absorb(calibrator.export(), at_most=5000)
    assert began.num_requests(Phase.NONE) == pytest.approx(5000)
    for _ in range(100):
        began.observe(load=2, phase=Phase.NONE, requests=1000, violations=0)
    assert began.probability(2, Phase.NONE).high < 0.01
