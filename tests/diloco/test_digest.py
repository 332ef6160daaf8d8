"""Digest and range fields: what is written can be read, and nonsense is refused by name."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.digest import (
    ByteRange,
    format_content_range,
    format_digest,
    parse_content_range,
    parse_digest,
    parse_range,
    sha256,
    sha256_of_start,
    verify_digest,
)
from service.errors import InputError


def test_a_digest_is_read_as_it_was_written() -> None:
    digest = sha256(b"abc")
    assert parse_digest(format_digest(digest), field="Repr-Digest") == digest
    assert parse_digest(f"md5=:YWJj:, {format_digest(digest)}", field="Repr-Digest") == digest


@pytest.mark.parametrize("value", [None, "", "sha-256=abc", "sha-256=:YWJj:", "sha-256=:A:", "sha-512=:YWJj:"])
def test_a_digest_that_cannot_be_read_is_named(value: str | None) -> None:
    with pytest.raises(InputError, match=r"^Content-Digest"):
        verify_digest(b"abc", value)


def test_other_bytes_do_not_match() -> None:
    with pytest.raises(InputError, match="does not match"):
        verify_digest(b"abd", format_digest(sha256(b"abc")))


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4), size=st.integers(1, 70))
def test_the_digest_of_the_start_comes_with_that_of_the_whole(data: bytes, cuts: list[int], size: int) -> None:
    places = [0, *sorted(cuts), len(data)]
    pieces = [memoryview(data)[start:stop] for start, stop in pairwise(places)]
    assert b"".join(pieces) == data[: places[-2]] + data[places[-2] :]
    assert sha256_of_start(pieces, size) == (sha256(data[:size]), sha256(data))


def test_a_content_range_is_read_as_it_was_written() -> None:
    part = ByteRange(4, 8, 20)
    assert format_content_range(part) == "bytes 4-7/20"
    assert parse_content_range("bytes 4-7/20", length=4) == part


@pytest.mark.parametrize(
    "value", [None, "", "bytes 4-7/*", "bytes 7-4/20", "bytes 4-8/20", "bytes 18-21/20", "bytes */20", "4-7/20"]
)
def test_a_content_range_that_does_not_fit_is_refused(value: str | None) -> None:
    with pytest.raises(InputError, match=r"^Content-Range"):
        parse_content_range(value, length=4)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("bytes=0-9", ByteRange(0, 10, 100)),
        ("bytes=90-", ByteRange(90, 100, 100)),
        ("bytes=0-", ByteRange(0, 50, 100)),
        ("bytes=95-200", ByteRange(95, 100, 100)),
    ],
)
def test_a_range_is_answered_in_part(value: str, part: ByteRange) -> None:
    assert parse_range(value, total=100, max_bytes=50) == part


@pytest.mark.parametrize("value", ["bytes=100-", "bytes=9-3", "bytes=-5", "bytes=0-1,4-5", "items=0-1", "x"])
def test_a_range_outside_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=r"^Range"):
        parse_range(value, total=100, max_bytes=50)
