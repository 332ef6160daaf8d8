"""Uploads: however the chunks come, the file is the whole or nothing."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.digest import sha256
from diloco.synchronizer.upload import (
    FINITE_BLOCK,
    MAX_AHEAD,
    MAX_DISTANCE,
    Chunk,
    Name,
    Upload,
    Uploads,
    part_path,
    require_finite,
    require_near,
)
from service.errors import InputError

DATA = bytes(range(200))
HEADER = b"header"


def chunk(start: int, stop: int) -> Chunk:
    return Chunk(start=start, total=len(DATA), digest=sha256(DATA), data=DATA[start:stop])


def upload(directory: Path, name: Name) -> Upload:
    return Upload(part_path(directory, name), total=1, digest=b"")


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), max_size=60))
def test_chunks_in_any_order_leave_a_beginning_of_the_whole(places: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        growing = Upload(part_path(Path(directory), Name("x")), total=len(DATA), digest=sha256(DATA), header=HEADER)
        for start, length in places:
            growing.append(chunk(start, min(start + length, len(DATA))))
            beginning = HEADER + DATA[: growing.received]
            assert growing.path.read_bytes()[: len(beginning)] == beginning
        growing.append(chunk(growing.received, len(DATA)))
        assert growing.is_complete
        growing.verify()


def test_other_bytes_than_announced_are_refused(tmp_path: Path) -> None:
    wrong = Upload(part_path(tmp_path, Name("x")), total=len(DATA), digest=sha256(b"other"))
    wrong.append(chunk(0, len(DATA)))
    with pytest.raises(InputError, match="does not match"):
        wrong.verify()


def test_a_new_upload_beyond_the_limit_takes_the_place_of_the_one_idle_for_longest(tmp_path: Path) -> None:
    uploads = Uploads(limit=2)
    a, b, c = (Name(owner) for owner in "abc")
    for name in (a, b):
        uploads.put(name, 0, upload(tmp_path, name))
    assert uploads.find(a, 0) is not None
    uploads.put(c, 0, upload(tmp_path, c))
    assert uploads.find(b, 0) is None
    assert uploads.find(a, 1) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["upload-a-0.part", "upload-c-0.part"]


def test_an_owner_has_uploads_of_two_epochs_until_the_newer_one_is_settled(tmp_path: Path) -> None:
    uploads = Uploads(limit=9)
    for epoch in (1, 7, 3):
        uploads.put(Name("a", epoch), 0, upload(tmp_path, Name("a", epoch)))
    uploads.put(Name("b", 1), 0, upload(tmp_path, Name("b", 1)))
    assert [uploads.find(Name("a", epoch), 0) is not None for epoch in (1, 3, 7)] == [False, True, True]
    uploads.settle(Name("a", 7))
    assert [uploads.find(Name("a", epoch), 0) is not None for epoch in (3, 7)] == [False, False]
    assert uploads.find(Name("b", 1), 0) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["upload-a-7.part", "upload-b-1.part"]


@pytest.mark.parametrize("value", [2 * MAX_DISTANCE, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("index", [0, FINITE_BLOCK + 4])
def test_a_vector_that_is_too_far_away_is_refused(index: int, value: float) -> None:
    base = torch.full((FINITE_BLOCK + 5,), 1e14)
    flat = base.clone()
    flat[index] = 1e17
    require_near(flat, base, what="the base")
    flat[index] = value
    with pytest.raises(InputError, match="away from the base"):
        require_near(flat, base, what="the base")


@pytest.mark.parametrize("index", [0, 17, FINITE_BLOCK, FINITE_BLOCK + 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_element_that_is_not_finite_is_named(index: int, value: float) -> None:
    flat = torch.zeros(FINITE_BLOCK + 5)
    require_finite(flat)
    flat[index:] = value
    with pytest.raises(InputError, match=f"element {index} is NaN or infinite"):
        require_finite(flat)


def test_chunks_may_come_ahead_of_their_turn(tmp_path: Path) -> None:
    data = bytes(range(250))
    parts = [(0, 100), (100, 150), (150, 230), (230, 250)]
    for order in itertools.permutations(range(4)):
        upload = Upload(tmp_path / "a.part", total=len(data), digest=sha256(data), header=b"head")
        told = []
        for index in order:
            start, stop = parts[index]
            chunk = Chunk(start=start, total=len(data), digest=sha256(data), data=data[start:stop])
            assert upload.wants(chunk)
            upload.append(chunk)
            told.append((upload.received, upload.ahead))
            assert not upload.wants(chunk) or start in upload.ahead
        assert told[-1] == (len(data), ())
        upload.verify()
        assert upload.path.read_bytes() == b"head" + data


def test_only_so_many_chunks_may_be_ahead_and_a_wrong_one_is_found_out(tmp_path: Path) -> None:
    data = bytes(2 * MAX_AHEAD)
    upload = Upload(tmp_path / "a.part", total=len(data), digest=sha256(data))
    for start in range(1, 2 * MAX_AHEAD):
        upload.append(Chunk(start=start, total=len(data), digest=sha256(data), data=b"\x01" if start == 5 else b"\x00"))
    assert upload.ahead == tuple(range(1, MAX_AHEAD + 1))
    for start in (0, *range(MAX_AHEAD + 1, 2 * MAX_AHEAD)):
        upload.append(Chunk(start=start, total=len(data), digest=sha256(data), data=b"\x00"))
    assert upload.is_complete
    with pytest.raises(InputError, match="does not match"):
        upload.verify()
