"""Make ``replay/data/bursty.jsonl``: ten minutes of on/off traffic, small enough for two CPU servers.

A Markov-modulated Poisson process: bursts of about 10 requests/s (5 per server) with exponentially distributed lengths
of 6 s on average, between lulls of 13 s with a request now and then. Lengths are log-normal, as in public traces.

    python -m replay.make_trace replay/data/bursty.jsonl
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay.traces import Request


@dataclass(frozen=True, slots=True)
class Phase:
    """One state of the process."""

    rate_per_s: float
    mean_length_s: float


SEED = 33
"""Of the first 300 the one whose ten minutes are most alike (145 to 253 requests): any slice has bursts and lulls."""
DURATION_S = 600.0
BURST = Phase(rate_per_s=10.0, mean_length_s=6.0)
LULL = Phase(rate_per_s=0.4, mean_length_s=13.0)
MEDIAN_INPUT_TOKENS, INPUT_SIGMA = 48, 0.8
MEDIAN_OUTPUT_TOKENS, OUTPUT_SIGMA = 14, 0.5


def make_requests(seed: int = SEED, *, duration_s: float = DURATION_S) -> Iterator[Request]:
    """Requests of alternating lulls and bursts."""
    draw = random.Random(seed)
    now_s, phase_ends_s, phase = 0.0, 0.0, BURST
    while now_s < duration_s:
        if now_s >= phase_ends_s:
            phase = LULL if phase is BURST else BURST
            phase_ends_s = now_s + draw.expovariate(1 / phase.mean_length_s)
        gap_s = draw.expovariate(phase.rate_per_s)
        if now_s + gap_s >= phase_ends_s:
            # Exponential gaps have no memory: the draw starts anew in the next phase.
            now_s = phase_ends_s
            continue
        now_s += gap_s
        if now_s >= duration_s:
            return
        yield Request(
            arrival_s=round(now_s, 3),
            input_tokens=_length(draw, MEDIAN_INPUT_TOKENS, INPUT_SIGMA),
            output_tokens=_length(draw, MEDIAN_OUTPUT_TOKENS, OUTPUT_SIGMA),
        )


def to_line(request: Request) -> str:
    record = {
        "arrival_s": request.arrival_s,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
    }
    return json.dumps(record) + "\n"


def main(argv: Sequence[str]) -> int:
    (path,) = argv
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(to_line(request) for request in make_requests())
    return 0


def _length(draw: random.Random, median: int, sigma: float) -> int:
    return max(1, round(median * math.exp(draw.gauss(0.0, sigma))))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
