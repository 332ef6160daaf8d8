"""Commands whose output cannot be written end with a code, at most one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console
from rich.progress import Progress

from service.child import module_command, module_environment
from service.output import READER_LEFT, guarded_output

DOCTOR = ("doctor", "--vllm", "http://127.0.0.1:9", "--timeout-s", "1")
COMMANDS = (DOCTOR, (*DOCTOR, "--json"), ("sidecar", "--help"))


@contextmanager
def left() -> Iterator[int]:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def full() -> Iterator[int]:
    with open("/dev/full", "wb") as file:  # noqa: PTH123
        yield file.fileno()


def run(*command: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | module_environment() | environment,
    )


def wadiloco(*arguments: str) -> list[str]:
    return [*module_command("wadiloco"), *arguments]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_reader_that_leaves_is_nothing_to_speak_of(arguments: tuple[str, ...]) -> None:
    with left() as stdout:
        done = run(*wadiloco(*arguments), stdout=stdout)
    assert (done.returncode, done.stderr) == (READER_LEFT, "")


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_full_disk_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    with full() as stdout:
        done = run(*wadiloco(*arguments), stdout=stdout)
    said = f"wadiloco {arguments[0]}: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (3, said)


def test_a_closed_output_changes_no_exit_code() -> None:
    done = run("sh", "-c", 'exec "$@" >&-', "sh", *wadiloco(*DOCTOR))
    assert (done.returncode, done.stderr) == (1, "")


def test_what_the_encoding_lacks_is_written_otherwise() -> None:
    done = run(*wadiloco(*DOCTOR), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (1, "")
    assert "-> start vLLM" in done.stdout


def test_errors_of_the_command_itself_are_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokenPipeError, match="to a peer"), guarded_output():
        raise BrokenPipeError("to a peer")
    with pytest.raises(SystemExit), guarded_output():
        raise SystemExit(sys.stdout.write("help"))
    assert capsys.readouterr().out == "help"


def test_the_old_output_is_back_afterwards() -> None:
    before = sys.stdout
    with guarded_output():
        assert sys.stdout is not before
    assert sys.stdout is before


def test_a_live_display_is_drawn_through_it(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_output(), Progress(console=Console(force_terminal=True)) as progress:
        progress.add_task("training", total=1)
        sys.stdout.write("a line between\n")
    assert "a line between" in (printed := capsys.readouterr().out)
    assert "training" in printed
