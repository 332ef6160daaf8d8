"""A good batch is read in one go, any other sample by sample: with the same result."""

from __future__ import annotations

import json

import pytest

from controller.ingest import read_batch
from service.errors import InputError
from sidecar.schema import LoadSample
from tests.controller.helpers import sample


def body(*samples: object) -> bytes:
    return json.dumps({"samples": samples}).encode()


def test_good_samples_come_as_objects_that_equal_those_read_one_by_one() -> None:
    point = {"horizon_s": 5.0, "arrivals_per_s": 2, "arrivals_per_s_q10": 1, "arrivals_per_s_q50": 2}
    full = sample("b", forecast=[point | {"arrivals_per_s_q90": 4}], made_up=[1], arrivals=3, state="down")
    told = [sample("a"), full]
    assert read_batch(body(*told)) == [LoadSample.model_validate(one) for one in told]


@pytest.mark.parametrize("bad", [7, None, {}, {**sample(), "running": -1}, {**sample(), "t_s": float("inf")}])
def test_one_bad_sample_leaves_all_to_be_judged_one_by_one(bad: object) -> None:
    read = read_batch(body(sample("a"), bad, sample("b")))
    assert [isinstance(one, LoadSample) for one in read] == [False] * 3
    assert (read[0], read[2]) == (sample("a"), sample("b"))


def test_a_batch_that_others_would_wait_for_is_judged_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.ingest.MAX_AT_ONCE_BYTES", 10)
    assert read_batch(body(sample("a"))) == [sample("a")]


def test_half_of_a_surrogate_pair_costs_one_sample() -> None:
    text = body(sample("a"), sample("b")).replace(b'"b"', b'"\\ud800"')
    assert [one["server_id"] for one in read_batch(text)] == ["a", "\ud800"]  # type: ignore[index]


@pytest.mark.parametrize("text", [b"", b"[]", b'{"samples": 3}', b'{"samples": [', b"\xff", b"[" * 100_000])
def test_what_is_no_batch_is_refused_by_field(text: bytes) -> None:
    with pytest.raises(InputError) as refused:
        read_batch(text)
    assert str(refused.value.field).startswith("body")
