"""``wadiloco export``, from a journal and from a running controller."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

import wadiloco
from tests.controller.export.journals import fill
from tests.controller.processes import controller

pytestmark = pytest.mark.usefixtures("root_logging")


def ids(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [row["id"] for row in csv.DictReader(file)]


def test_a_journal_is_exported_and_the_next_export_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, out = fill(tmp_path / "j.sqlite", decisions=9), tmp_path / "decisions.csv"
    command = ["export", "--journal", str(journal), "--table", "decisions", "--out", str(out), "--json"]
    assert wadiloco.main([*command, "--limit", "4"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["next_since"], first["num_bytes"]) == (4, out.stat().st_size)
    assert ids(out) == ["1", "2", "3", "4"]
    assert wadiloco.main([*command, "--since", "4"]) == 0
    assert ids(out) == ["5", "6", "7", "8", "9"]


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, out = tmp_path / "j.sqlite", tmp_path / "out.csv"
    out.write_text("old")
    journal.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    assert wadiloco.main(["export", "--journal", str(journal), "--table", "rounds", "--out", str(out)]) == 3
    assert "wadiloco export: --journal: cannot be read" in capsys.readouterr().err
    assert (out.read_text(), sorted(path.name for path in tmp_path.iterdir())) == ("old", ["j.sqlite", "out.csv"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --journal FILE or --controller URL"),
        (["--journal", "a", "--controller", "http://127.0.0.1:1"], "give either --journal FILE or --controller URL"),
        (["--journal", "no-such-file"], "journal: no-such-file is not a file"),
        (["--journal", "a", "--table", "agents"], "table:"),
        (["--journal", "a", "--out", "-"], "out: - is no file"),
        (["--journal", "a", "--out", "rows.tsv"], "rows.tsv ends with neither .csv nor .parquet; give --format too"),
    ],
)
def test_what_cannot_work_is_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["export", "--table", "samples", "--out", str(tmp_path / "x.csv")]
    assert wadiloco.main([*base, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("ending", ["", "-wal", ".lock"])
def test_an_export_never_replaces_the_journal(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = fill(tmp_path / "run.sqlite", samples=1)
    (tmp_path / "link").symlink_to(tmp_path)
    out = tmp_path / "link" / f"run.sqlite{ending}"
    base = ["export", "--journal", str(journal), "--table", "samples", "--format", "csv"]
    assert wadiloco.main([*base, "--out", str(out)]) == 2
    assert "is the journal, or a file of it: name another one" in capsys.readouterr().err
    assert wadiloco.main([*base, "--out", str(tmp_path / "run.sqlite.csv")]) == 0


def test_a_controller_that_is_away_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["export", "--table", "samples", "--out", str(tmp_path / "x.csv"), "--controller", "http://127.0.0.1:1"]
    assert wadiloco.main(base) == 3
    assert "wadiloco export: controller: no answer from http://127.0.0.1:1: " in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()


def test_the_format_follows_the_name_and_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("service.extras.find_spec", lambda _: None)
    journal = fill(tmp_path / "j.sqlite", samples=1)
    out = tmp_path / "samples.parquet"
    assert wadiloco.main(["export", "--journal", str(journal), "--table", "samples", "--out", str(out)]) == 3
    remedy = "Python package pyarrow is not installed (pip install 'wadiloco[export]')"
    assert capsys.readouterr().err == f"wadiloco export: {remedy}\n"


@pytest.mark.integration
def test_a_running_controller_is_exported(tmp_path: Path) -> None:
    with controller(tmp_path) as process:
        process.register()
        out = tmp_path / "decisions.csv"
        while not out.exists() or not ids(out):
            command = ["export", "--controller", str(process.http.base_url), "--table", "decisions"]
            assert wadiloco.main([*command, "--out", str(out)]) == 0
        assert ids(out)[0] == "1"
        live = tmp_path / "live.csv"
        journal = ["export", "--journal", str(tmp_path / "journal.sqlite"), "--table", "decisions", "--out", str(live)]
        assert wadiloco.main(journal) == 0
        assert ids(live)[: len(ids(out))] == ids(out)
