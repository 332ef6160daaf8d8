"""What codecs cost on one core, and how many bytes they make: ``make bench``.

Twenty million parameters' pseudo-gradient, encoded and decoded by each codec in turns, so that a busy moment of the
machine hits all. Times are CPU times of one thread. GB/s are those of the fp32 bytes that the vector would be. With
feedback is all that an island does with a pseudo-gradient: copy it, add what is owed, encode, decode, and keep what was
left out. Checking and merging are what the synchronizer does with a contribution's file, in the calls of a round: see
that it is finite and near enough; decode it, put it in its place, and add it to the mean, a block at a time.
fp32 is checked and shared, not copied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.codec import CODECS, Codec
from diloco.digest import sha256
from diloco.feedback import ErrorFeedback
from diloco.fragment import wire_bytes
from diloco.outer import Contribution, weighted_mean
from diloco.schema import CodecName, Manifest, TensorSpec
from diloco.synchronizer.contribution import Accepted, begin_contribution, verify_contribution
from diloco.synchronizer.generation import Outcome, write_generation
from diloco.synchronizer.rounds import Claim
from diloco.synchronizer.step import Placed, Share
from diloco.synchronizer.upload import Chunk, Upload

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

NUM_VALUES = 20_000_000
GIGABYTES = 4 * NUM_VALUES / 1e9
ROUNDS = 11
LINK_GB_PER_S = 1.0
ENCODE_SHARE = 0.25
"""Of the time that the fp32 bytes take on such a link: what encoding may cost."""


def seconds(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def shown(times_s: list[float]) -> str:
    speeds = [GIGABYTES / time_s for time_s in times_s]
    low, _, high = statistics.quantiles(speeds, n=4)
    return f"{statistics.median(speeds):6.2f} ({low:5.2f} to {high:5.2f})"


def claim_of(slot: int, codec: CodecName) -> Claim:
    return Claim(round=0, slot=slot, epoch=0, tokens=1, codec=codec)


def uploaded(directory: Path, slot: int, codec: CodecName, payload: Tensor) -> Upload:
    """A complete upload, as the synchronizer has it."""
    data = bytes(wire_bytes(payload))
    chunk = Chunk(start=0, total=len(data), digest=sha256(data), data=data)
    upload = begin_contribution(directory, claim_of(slot, codec), chunk)
    upload.append(chunk)
    return upload


def test_how_fast_codecs_are_and_how_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    current = torch.randn(NUM_VALUES)
    flat = 1e-3 * torch.randn(NUM_VALUES)
    payloads = {name: codec.encode(flat).clone() for name, codec in CODECS.items()}
    feedbacks = {name: ErrorFeedback(codec, NUM_VALUES) for name, codec in CODECS.items()}
    out, scratch = torch.empty(NUM_VALUES), torch.empty(NUM_VALUES)
    manifest = Manifest(tensors=(TensorSpec(name="weight", shape=(NUM_VALUES,), dtype="float32"),))
    outcome = Outcome(outer_lr=0.7, outer_momentum=0.9)
    base = write_generation(tmp_path, 0, manifest, current, torch.zeros_like(current), outcome=outcome)
    uploads = {name: uploaded(tmp_path, slot, name, payload) for slot, (name, payload) in enumerate(payloads.items())}
    shares = {
        name: Share(
            accepted=Accepted(claim=claim_of(slot, name), digest=b"", path=uploads[name].path, into=0),
            base=base,
            weight=1.0,
        )
        for slot, name in enumerate(payloads)
    }

    def merge(codec: Codec) -> None:
        mine = Placed.of(shares[codec.name], current)
        weighted_mean({0: Contribution(local=current, tokens=1), 1: mine}, out=out, scratch=scratch)

    columns: dict[str, Callable[[Codec], object]] = {
        "encode": lambda codec: codec.encode(flat),
        "with feedback": lambda codec: feedbacks[codec.name].encode(out.copy_(flat)),
        "decode": lambda codec: codec.decode(payloads[codec.name], NUM_VALUES),
        "check": lambda codec: verify_contribution(uploads[codec.name], current, codec),
        "decode + merge": merge,
    }
    times_s: dict[tuple[str, str], list[float]] = {(name, column): [] for name in CODECS for column in columns}
    for _ in range(ROUNDS):
        for name, codec in CODECS.items():
            for column, work in columns.items():
                times_s[name, column].append(seconds(lambda codec=codec, work=work: work(codec)))  # type: ignore[misc]
    with capsys.disabled():
        print(f"\n{NUM_VALUES:,} values, one thread, {ROUNDS} rounds: GB/s of fp32, median (quartiles)")
        print(f"{'':5}{'bytes':>8}" + "".join(f"{column:>28}" for column in columns))
        for name, codec in CODECS.items():
            share = codec.num_bytes(NUM_VALUES) / CODECS["fp32"].num_bytes(NUM_VALUES)
            row = "".join(f"{shown(times_s[name, column]):>28}" for column in columns)
            print(f"{name:5}{share:8.2%}{row}")
        for name in CODECS:
            alone, owing = (
                statistics.median(times_s[name, column]) * LINK_GB_PER_S / GIGABYTES
                for column in ("encode", "with feedback")
            )
            print(
                f"{name}: encoding takes {alone:.0%} of the time of the fp32 bytes at {LINK_GB_PER_S:g} GB/s, "
                f"{owing:.0%} with what an island does for its feedback"
            )
    for name in CODECS:
        assert statistics.median(times_s[name, "encode"]) <= ENCODE_SHARE * GIGABYTES / LINK_GB_PER_S, name
        merged_s = statistics.median(times_s[name, "check"]) + statistics.median(times_s[name, "decode + merge"])
        assert merged_s <= GIGABYTES, name
