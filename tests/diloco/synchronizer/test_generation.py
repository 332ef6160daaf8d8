"""Generations on disk: readable by anybody, intact or set aside."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.codec import CODECS
from diloco.fragment import wire_bytes
from diloco.schema import Applied, Manifest, TensorSpec
from diloco.synchronizer.generation import (
    NUM_KEPT,
    RUN_DIGITS,
    Encoded,
    Generation,
    Outcome,
    newest_generation,
    path_of,
    prune_generations,
    read_generation,
    write_generation,
)
from diloco.tensorfile import parse_header, reheaded, sealed, unsealed
from service.errors import InputError

MANIFEST = Manifest(
    tensors=(
        TensorSpec(name="a", shape=(2, 3), dtype="float32"),
        TensorSpec(name="empty", shape=(0,), dtype="float32"),
        TensorSpec(name="b", shape=(), dtype="bfloat16"),
    )
)
LAST = Applied(round=1, into=2, digest="cd" * 32)
OUTCOME = Outcome(
    run="0" * 32,
    applied={0: "ab" * 32, 3: "cd" * 32},
    last={3: LAST, 70: LAST},
    epochs={0: 1, 3: 9},
    outer_lr=0.7,
    outer_momentum=0.9,
)


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


@pytest.mark.parametrize("encoded", [False, True], ids=["whole", "encoded"])
def test_a_run_that_goes_back_goes_on_under_another_identity(tmp_path: Path, encoded: bool) -> None:
    exact = torch.arange(7.0) + 0.5
    way = Encoded(exact=exact, codec="int8", payload=CODECS["int8"].encode(exact)) if encoded else None
    before = write_generation(
        tmp_path, 1, MANIFEST, torch.arange(7.0), -exact, outcome=OUTCOME, encoded=way if encoded else None
    )
    write(tmp_path, 2).path.write_bytes(b"garbage" * 100)
    found, again = newest_generation(tmp_path), newest_generation(tmp_path)
    assert found is not None
    assert again is not None
    assert found[0] == again[0]
    assert found[0].run != OUTCOME.run
    assert len(found[0].run) == RUN_DIGITS
    assert replace(found[0].outcome, run=OUTCOME.run) == OUTCOME
    assert found[0].digest == before.digest
    assert torch.equal(found[1], exact if encoded else torch.arange(7.0))
    assert torch.equal(found[2], -exact)
    assert torch.equal(found[0].parameters(), torch.arange(7.0))


def test_a_generation_from_before_runs_had_identities_gets_one_that_stays(tmp_path: Path) -> None:
    path = write(tmp_path, 5).path
    data = path.read_bytes()
    header = parse_header(data)
    old = {key: value for key, value in unsealed(header.metadata).items() if key not in {"run", "last"}}
    path.write_bytes(reheaded(header, sealed(old)) + data[header.data_offset :])
    outcomes = [read_generation(path)[0].outcome for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0].run) == RUN_DIGITS
    # Of its last round it knows, as repetitions of that are what may still come.
    assert outcomes[0].last == {
        slot: Applied(round=4, into=4, digest=digest) for slot, digest in OUTCOME.applied.items()
    }


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
