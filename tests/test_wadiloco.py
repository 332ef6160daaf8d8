"""The front door: lazy, and clear about what it does not know or have."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wadiloco


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert wadiloco.main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in wadiloco.COMMANDS)


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert wadiloco.main(["dance"]) == 2
    assert "no such command: dance" in capsys.readouterr().err


def test_bad_settings_end_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert wadiloco.main(["sidecar", "--vllm", "http://127.0.0.1:1", "--port", "70000"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wadiloco sidecar: port:")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "command", ["sidecar", "controller", "doctor", "calibrate", "island", "switchback", "export", "control"]
)
def test_serving_side_commands_load_no_numerics(command: str) -> None:
    program = (
        "import importlib, sys, wadiloco;"
        f"importlib.import_module(wadiloco.COMMANDS[{command!r}].module);"
        "heavy = {'torch', 'numpy', 'matplotlib', 'safetensors'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("synchronizer", "--directory", "x", "--quorum", "1"),
        ("island", "--controller", "http://127.0.0.1:1"),
        ("island", "--slot", "0", "--synchronizer", "http://127.0.0.1:1"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_the_remedy(arguments: tuple[str, ...]) -> None:
    done = run_without(arguments, package="torch")
    assert done.returncode == 3
    remedy = "Python package torch is not installed (pip install 'wadiloco[train]')"
    assert done.stderr == f"wadiloco {arguments[0]}: {remedy}\n"


@pytest.mark.parametrize(
    ("command", "package"),
    [("synchronizer", "torch"), ("island", "torch"), ("replay", "numpy"), ("demo", "matplotlib")],
)
def test_help_needs_no_extra(command: str, package: str) -> None:
    done = run_without((command, "--help"), package=package)
    assert done.returncode == 0, done.stderr
    assert f"usage: wadiloco {command}" in done.stdout


@pytest.mark.parametrize("command", wadiloco.COMMANDS)
def test_help_speaks_of_options_and_not_of_python(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wadiloco.main([command, "--help"])
    printed = capsys.readouterr().out
    assert "--config PATH" in printed
    assert "--print-config" in printed
    for internal in ("SecretStr", "tuple[", "dict[", "default factory", "lambda", "default: None", "default: ()"):
        assert internal not in printed


def run_without(arguments: tuple[str, ...], *, package: str) -> subprocess.CompletedProcess[str]:
    """A command in an interpreter that lacks one package."""
    program = (
        f"import sys; sys.modules[{package!r}] = None;"
        f"import wadiloco; raise SystemExit(wadiloco.main({list(arguments)!r}))"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
