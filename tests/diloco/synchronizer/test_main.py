"""Starting a synchronizer: errors name the field, a run goes on with what it finds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diloco.schema import Manifest, TensorSpec
from diloco.synchronizer.app import create_app
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.generation import Outcome, newest_generation, path_of, write_generation
from diloco.synchronizer.main import main
from diloco.transport import SynchronizerClient
from service.errors import ConfigError, InputError, WadilocoError
from service.server import bind

MANIFEST = Manifest(tensors=(TensorSpec(name="weight", shape=(8,), dtype="float32"),))
OUTCOME = Outcome(outer_lr=0.7, outer_momentum=0.9)


def write(directory: Path, version: int) -> Path:
    parameters = torch.full((8,), float(version))
    return write_generation(directory, version, MANIFEST, parameters, parameters, outcome=OUTCOME).path


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--quorum", "0"], "quorum"),
        (["--outer-lr", "0"], "outer_lr"),
        (["--outer-momentum", "1"], "outer_momentum"),
        (["--round-timeout-s", "0"], "round_timeout_s"),
        (["--threads", "0"], "threads"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, arguments: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main(["--directory", str(tmp_path), *arguments])
    assert refused.value.field == field


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"directory: cannot write to .*file/state: Not a directory \(choose"):
        main(["--directory", str(tmp_path / "file" / "state")])


def test_a_taken_port_is_named_and_the_directory_is_free_again(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        for _ in range(2):
            with pytest.raises(WadilocoError, match=r"port: .* is in use"):
                main(["--directory", str(tmp_path), "--port", str(listener.getsockname()[1])])


def test_a_directory_of_damaged_generations_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="are damaged"):
        main(["--directory", str(tmp_path), "--port", "0"])
    assert path.exists()


def test_a_run_goes_on_from_the_generation_before_a_damaged_one(
    serve: Callable[..., str], connect: Callable[[str], SynchronizerClient], tmp_path: Path
) -> None:
    write(tmp_path, 4)
    newest = write(tmp_path, 5)
    newest.write_bytes(newest.read_bytes()[:-1])
    client = connect(serve(tmp_path))
    pulled = torch.empty(8)
    assert client.pull(5, pulled, deadline_s=time.time() + 20) == 4
    assert torch.equal(pulled, torch.full((8,), 4.0))
    client.push(pulled, round=4, slot=0, epoch=0, tokens=1, deadline_s=time.time() + 20)
    assert client.wait_version(4, deadline_s=time.time() + 20) == 5
    found = newest_generation(tmp_path)
    assert found is not None
    assert found[0].path == path_of(tmp_path, 5)


def test_a_learning_rate_that_changes_within_a_run_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 4)
    with caplog.at_level(logging.WARNING):
        create_app(SynchronizerSettings(directory=tmp_path, outer_lr=0.5))
    assert "outer_lr=0.5 before=0.7" in caplog.text
    assert "outer_momentum" not in caplog.text
