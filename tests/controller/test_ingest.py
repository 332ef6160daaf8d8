"""A batch is parsed as it is; samples are judged later, one by one."""

from __future__ import annotations

import json

import pytest

from controller.ingest import read_batch
from service.errors import InputError
from tests.controller.helpers import sample


def body(*samples: object) -> bytes:
    return json.dumps({"samples": samples}).encode()


@pytest.mark.parametrize("bad", [7, None, {}, {**sample(), "running": -1}, {**sample(), "t_s": float("inf")}])
def test_samples_come_as_they_were_sent(bad: object) -> None:
    read = read_batch(body(sample("a"), bad, sample("b")))
    assert (len(read), read[0], read[2]) == (3, sample("a"), sample("b"))


def test_half_of_a_surrogate_pair_costs_one_sample() -> None:
    text = body(sample("a"), sample("b")).replace(b'"b"', b'"\\ud800"')
    assert [one["server_id"] for one in read_batch(text)] == ["a", "\ud800"]  # type: ignore[index]


@pytest.mark.parametrize("text", [b"", b"[]", b'{"samples": 3}', b'{"samples": [', b"\xff", b"[" * 100_000])
def test_what_is_no_batch_is_refused_by_field(text: bytes) -> None:
    with pytest.raises(InputError) as refused:
        read_batch(text)
    assert str(refused.value.field).startswith("body")
