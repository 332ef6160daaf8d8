"""What can be told of a workload without running it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from diloco.workload_source import check_workload
from service.errors import InputError

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a source file under the working directory; whoever runs it fails the test."""
    monkeypatch.chdir(tmp_path)

    def put(name: str, source: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{source}\nraise AssertionError('was imported')\n")

    return put


@pytest.mark.parametrize(
    "source",
    [
        "def make(): ...",
        "class make: ...",
        "make = other = print",
        "import make",
        "from torch import nn as make",
        "from torch import *",
        "if True:\n    make = 1",
        "def __getattr__(name): ...",
    ],
)
def test_a_module_that_may_have_the_factory_passes_and_is_not_run(write: Write, source: str) -> None:
    write("mine_a.py", source)
    check_workload("mine_a:make")


@pytest.mark.parametrize("place", ["pack_a/inner/deep.py", "pack_a/inner/deep/__init__.py"])
@pytest.mark.parametrize("is_regular", [True, False])
def test_packages_around_it_are_not_run_either(write: Write, place: str, is_regular: bool) -> None:
    write(place, "def make(): ...")
    if is_regular:
        write("pack_a/__init__.py", "")
        if place.endswith("deep.py"):
            write("pack_a/inner/__init__.py", "")
    check_workload("pack_a.inner.deep:make")
    assert "pack_a" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere_b:make", "no module nowhere_b on Python's path or in "),
        ("pack_b.other:make", r"no module pack_b\.other on Python's path"),
        ("mine_b.inner:make", r"no module mine_b\.inner on Python's path"),
        ("specless_b:make", "no module specless_b"),
        ("mine_b:other", r"mine_b \(.*mine_b\.py\) has no other"),
        ("torn_b:make", r"torn_b\.py is not valid Python: invalid syntax"),
        ("coded_b:make", r"coded_b\.py is not valid Python: "),
    ],
)
def test_what_cannot_be_loaded_is_told_with_its_field(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "specless_b", ModuleType("specless_b"))
    write("mine_b.py", "def make(): ...")
    write("torn_b.py", "def make(:")
    write("pack_b/__init__.py", "")
    (tmp_path / "coded_b.py").write_bytes(b"# coding: utf-8\nmake = '\xff'\n")
    with pytest.raises(InputError, match=message) as caught:
        check_workload(name)
    assert caught.value.field == "workload"


def test_a_module_on_the_path_is_not_hidden_by_the_working_directory(write: Write) -> None:
    write("json.py", "def make(): ...")
    with pytest.raises(InputError, match="has no make"):
        check_workload("json:make")
    check_workload("json:dumps")
    check_workload("math:whatever")  # no source to look at: left to the worker


def test_looking_needs_no_torch() -> None:
    code = "import sys, diloco.agent.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
