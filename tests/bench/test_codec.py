"""What codecs cost on one core, and how many bytes they make: ``make bench``.

Twenty million parameters' pseudo-gradient, encoded and decoded by each codec in turns, so that a busy moment of the
machine hits all. Times are wall times of one thread. GB/s are those of the fp32 bytes that the vector would be. With
feedback is all that an island does with a pseudo-gradient: copy it, add what is owed, encode, decode, and keep what was
left out. Merging is what the synchronizer does with what it decoded: put it in its place, and add it to the mean.
fp32 is checked and shared, not copied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from diloco.codec import CODECS, Codec
from diloco.feedback import ErrorFeedback
from diloco.outer import Contribution, weighted_mean

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

NUM_VALUES = 20_000_000
GIGABYTES = 4 * NUM_VALUES / 1e9
ROUNDS = 11
LINK_GB_PER_S = 1.0
ENCODE_SHARE = 0.25
"""Of the time that the fp32 bytes take on such a link: what encoding may cost."""


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def shown(times_s: list[float]) -> str:
    speeds = [GIGABYTES / time_s for time_s in times_s]
    low, _, high = statistics.quantiles(speeds, n=4)
    return f"{statistics.median(speeds):6.2f} ({low:5.2f} to {high:5.2f})"


def test_how_fast_codecs_are_and_how_small(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    current = torch.randn(NUM_VALUES)
    flat = 1e-3 * torch.randn(NUM_VALUES)
    payloads = {name: codec.encode(flat).clone() for name, codec in CODECS.items()}
    feedbacks = {name: ErrorFeedback(codec, NUM_VALUES) for name, codec in CODECS.items()}
    out, scratch = torch.empty(NUM_VALUES), torch.empty(NUM_VALUES)

    def merge(codec: Codec) -> None:
        vector = codec.decode(payloads[codec.name], NUM_VALUES)
        placed = vector if codec.carries_parameters else vector.mul_(-1.0).add_(current)
        mine = Contribution(local=placed, tokens=1)
        weighted_mean({0: Contribution(local=current, tokens=1), 1: mine}, out=out, scratch=scratch)

    columns: dict[str, Callable[[Codec], object]] = {
        "encode": lambda codec: codec.encode(flat),
        "with feedback": lambda codec: feedbacks[codec.name].encode(out.copy_(flat)),
        "decode": lambda codec: codec.decode(payloads[codec.name], NUM_VALUES),
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
        assert statistics.median(times_s[name, "decode + merge"]) <= GIGABYTES, name
