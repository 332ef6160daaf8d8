"""Layout of gate and ring: fixed sizes, round trips, and damage that is seen."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.vllm_plugin.records import (
    EMPTY_SLOT,
    GATE_BYTES,
    NUM_SLOTS,
    RECORD_BYTES,
    SLOT_BYTES,
    VALUES_PER_RECORD,
    VALUES_PER_REQUEST,
    FinishedRequest,
    RecordFlag,
    RingHeader,
    Slot,
    SlotFlag,
    StepRecord,
    decode_record,
    decode_ring_header,
    decode_slot,
    encode_record,
    encode_ring_header,
    encode_slot,
    gate_header,
    record_offset,
)

COUNTS = st.integers(0, (1 << 32) - 1)
LONG = st.integers(0, (1 << 63) - 1)
LATENCY = st.floats(0, 1e6, width=32)
LATENCIES = st.lists(LATENCY, max_size=VALUES_PER_RECORD // 3).map(tuple)
REQUESTS = st.lists(st.builds(FinishedRequest, LATENCY, LATENCY, LATENCY), max_size=VALUES_PER_RECORD // 9).map(tuple)


def record(**changes: object) -> StepRecord:
    fields: dict[str, object] = {"sequence": 1, "at_ns": 2, "step": 3, "running": 4, "waiting": 5, "kv_usage": 0.5}
    return StepRecord(**fields | changes)  # type: ignore[arg-type]


@given(COUNTS, COUNTS, COUNTS, LONG, st.floats(0, 1, width=32))
def test_a_slot_comes_back_as_it_was_written(
    in_flight: int, running: int, waiting: int, time_ns: int, pace: float
) -> None:
    slot = Slot(
        sequence=time_ns,
        heartbeat_ns=time_ns,
        changed_ns=time_ns,
        in_flight=in_flight,
        running=running,
        waiting=waiting,
        pace=pace,
        flags=SlotFlag.INGRESS | SlotFlag.SIDECAR,
        engine=3,
        pid=running,
        start_ticks=time_ns,
        pid_namespace=waiting,
    )
    assert decode_slot(encode_slot(slot)) == slot


@given(REQUESTS, LATENCIES, LATENCIES)
def test_a_step_record_comes_back_as_it_was_written(
    finished: tuple[FinishedRequest, ...], ttft_s: tuple[float, ...], itl_s: tuple[float, ...]
) -> None:
    written = record(finished=finished, ttft_s=ttft_s, itl_s=itl_s, flags=RecordFlag.CONTINUED, finished_total=7)
    raw = encode_record(written)
    assert len(raw) == RECORD_BYTES
    assert decode_record(raw) == written


def test_an_unknown_kv_usage_stays_unknown() -> None:
    read = decode_record(encode_record(record(kv_usage=math.nan)))
    assert read is not None
    assert math.isnan(read.kv_usage)


@given(st.integers(0, SLOT_BYTES - 1), st.integers(1, 255))
def test_a_damaged_slot_is_none(position: int, change: int) -> None:
    raw = bytearray(encode_slot(Slot(in_flight=3, pid=77)))
    raw[position] ^= change
    assert decode_slot(bytes(raw)) is None


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_damaged_record_is_none(position: int, change: int) -> None:
    raw = bytearray(encode_record(record(itl_s=(0.5,) * VALUES_PER_RECORD)))
    raw[position] ^= change
    assert decode_record(bytes(raw)) is None


@given(st.binary(max_size=2 * RECORD_BYTES))
def test_garbage_is_no_slot_no_record_and_no_header(raw: bytes) -> None:
    assert decode_slot(raw) is None
    assert decode_record(raw) is None
    assert decode_ring_header(raw) is None


def test_a_free_slot_is_no_slot() -> None:
    assert decode_slot(EMPTY_SLOT) is None


def test_more_latencies_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a record holds"):
        encode_record(record(itl_s=(0.1,) * (VALUES_PER_RECORD + 1)))


def test_a_ring_header_of_another_layout_is_refused() -> None:
    header = RingHeader(pid=1, engine=0, start_ticks=2, pid_namespace=3, max_num_seqs=256, created_ns=4)
    raw = encode_ring_header(header)
    assert decode_ring_header(raw.ljust(128, b"\0")) == header
    body = bytearray(raw[:-4])
    struct.pack_into("<I", body, 8, RECORD_BYTES * 2)
    assert decode_ring_header(bytes(body) + struct.pack("<I", zlib.crc32(body))) is None


def test_sizes_are_what_other_versions_expect() -> None:
    assert len(gate_header()) == SLOT_BYTES == 64
    assert GATE_BYTES == 64 * (NUM_SLOTS + 1) == 2048
    assert record_offset(1) == record_offset(4097) == 128
    assert (VALUES_PER_RECORD, VALUES_PER_RECORD % VALUES_PER_REQUEST) == (105, 0)
