"""Generations on disk: readable by anybody, intact or set aside."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.fragment import wire_bytes
from diloco.schema import Manifest, TensorSpec
from diloco.synchronizer.generation import (
    NUM_KEPT,
    Generation,
    Outcome,
    newest_generation,
    path_of,
    prune_generations,
    read_generation,
    write_generation,
)
from service.errors import InputError

MANIFEST = Manifest(
    tensors=(
        TensorSpec(name="a", shape=(2, 3), dtype="float32"),
        TensorSpec(name="empty", shape=(0,), dtype="float32"),
        TensorSpec(name="b", shape=(), dtype="bfloat16"),
    )
)
OUTCOME = Outcome(applied={0: "ab", 3: "cd"}, epochs={0: 1, 3: 9}, outer_lr=0.7, outer_momentum=0.9)


def write(directory: Path, version: int) -> Generation:
    parameters = torch.arange(7.0) + version
    return write_generation(directory, version, MANIFEST, parameters, -parameters, outcome=OUTCOME)


def test_a_generation_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = write(tmp_path, 5)
    generation, parameters, momentum = read_generation(written.path)
    assert generation == written
    assert torch.equal(parameters, torch.arange(7.0) + 5)
    assert torch.equal(momentum, -parameters)
    assert generation.read(4, 12) == bytes(wire_bytes(parameters)[4:12])


def test_a_generation_is_a_safetensors_file_with_the_names_of_the_model(tmp_path: Path) -> None:
    tensors = load_file(write(tmp_path, 0).path)
    assert torch.equal(tensors["parameters.a"], torch.arange(6.0).view(2, 3))
    assert tensors["parameters.b"] == 6
    assert tensors["momentum.empty"].shape == (0,)


@pytest.mark.parametrize("position", [4, 40, 900, -40, -4])
def test_a_damaged_newest_generation_is_set_aside_loudly(
    tmp_path: Path, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2).path
    data = bytearray(newest.read_bytes())
    data[position] ^= 0x55
    newest.write_bytes(data)
    with caplog.at_level(logging.ERROR):
        found = newest_generation(tmp_path)
    assert found is not None
    assert found[0].version == 1
    assert "generation is damaged" in caplog.text
    assert [path.name for path in tmp_path.glob("*.corrupt")] == [newest.name + ".corrupt"]


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_truncated_generation_is_damaged(tmp_path: Path, length: int) -> None:
    path = write(tmp_path, 2).path
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(InputError):
        read_generation(path)


def test_nothing_but_damaged_generations_is_never_taken_for_a_new_run(tmp_path: Path) -> None:
    path_of(tmp_path, 2).write_bytes(b"garbage" * 10)
    for _ in range(2):
        with pytest.raises(InputError, match=r"all 1 generations in .* are damaged"):
            newest_generation(tmp_path)


def test_an_empty_directory_has_no_generation(tmp_path: Path) -> None:
    assert newest_generation(tmp_path) is None


def test_two_generations_are_kept(tmp_path: Path) -> None:
    for version in range(5):
        write(tmp_path, version)
    prune_generations(tmp_path)
    kept = sorted(tmp_path.glob("generation-*"))
    assert kept == [path_of(tmp_path, version) for version in range(5 - NUM_KEPT, 5)]


def test_a_generation_that_takes_the_place_of_a_pruned_one_is_whole(tmp_path: Path) -> None:
    for version in range(3):
        write(tmp_path, version)
    one = read_generation(path_of(tmp_path, 1))[0]
    expected, reader = one.read(0, one.num_bytes), one.open()
    before = path_of(tmp_path, 0).stat().st_ino
    prune_generations(tmp_path)
    assert write(tmp_path, 3).path.stat().st_ino == before
    assert read_generation(path_of(tmp_path, 3))[0].version == 3
    with reader:
        prune_generations(tmp_path)
        write(tmp_path, 4)
        assert reader.read(len(expected)) == expected
    assert read_generation(path_of(tmp_path, 4))[0].version == 4
