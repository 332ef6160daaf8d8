"""Uploads: however the chunks come, the file is the whole or nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.digest import sha256
from diloco.synchronizer.upload import FINITE_BLOCK, Chunk, Upload, Uploads, part_path, require_finite
from service.errors import InputError

DATA = bytes(range(200))
HEADER = b"header"


def chunk(start: int, stop: int) -> Chunk:
    return Chunk(start=start, total=len(DATA), digest=sha256(DATA), data=DATA[start:stop])


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), max_size=60))
def test_chunks_in_any_order_leave_a_beginning_of_the_whole(places: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        upload = Upload(part_path(Path(directory), "x"), total=len(DATA), digest=sha256(DATA), header=HEADER)
        for start, length in places:
            upload.append(chunk(start, min(start + length, len(DATA))))
            assert upload.path.read_bytes() == HEADER + DATA[: upload.received]
        upload.append(chunk(upload.received, len(DATA)))
        assert upload.is_complete
        upload.verify()


def test_other_bytes_than_announced_are_refused(tmp_path: Path) -> None:
    upload = Upload(part_path(tmp_path, "x"), total=len(DATA), digest=sha256(b"other"))
    upload.append(chunk(0, len(DATA)))
    with pytest.raises(InputError, match="does not match"):
        upload.verify()


def test_a_new_upload_beyond_the_limit_takes_the_place_of_the_one_idle_for_longest(tmp_path: Path) -> None:
    uploads = Uploads(limit=2)
    for name in ("a", "b"):
        uploads.put(name, 0, Upload(part_path(tmp_path, name), total=1, digest=b""))
    assert uploads.find("a", 0) is not None
    uploads.put("c", 0, Upload(part_path(tmp_path, "c"), total=1, digest=b""))
    assert uploads.find("b", 0) is None
    assert uploads.find("a", 1) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["upload-a.part", "upload-c.part"]


@pytest.mark.parametrize("index", [0, 17, FINITE_BLOCK, FINITE_BLOCK + 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_element_that_is_not_finite_is_named(index: int, value: float) -> None:
    flat = torch.zeros(FINITE_BLOCK + 5)
    require_finite(flat)
    flat[index:] = value
    with pytest.raises(InputError, match=f"element {index} is NaN or infinite"):
        require_finite(flat)
