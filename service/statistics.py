"""Paired statistics without any package (pure).

**Sign-flip test.** If two policies were alike, each paired difference would as likely have the other sign: p = share of
the 2^n sign patterns whose absolute sum is at least the one seen (all patterns up to n = 16, else 65,536 random ones
with the one seen counted in). The smallest p that n pairs can give is 2^(1-n): 0.06 with 5, below 0.01 from 8 on.

**Interval.** Percentile bootstrap of the mean, nominally 95 %. With few pairs it is too narrow: on normal differences
it covered the true mean in 84 % of 1,500 trials with 5 pairs, 89 % with 8 and 93 % with 30. It shows the size of an
effect; whether there is one is the test's to say.

Both work on tables of sums: a sum of g signed values, or of g draws with replacement, is one entry of the table of all
of them. So they take milliseconds, and a resample of few values is not drawn at all but enumerated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

EXACT_UP_TO = 16
NUM_SIGN_PATTERNS = 1 << EXACT_UP_TO
NUM_RESAMPLES = 10_000
MAX_TABLE = 50_000
"""Entries of one table of sums: 6^6 resamples of six values fit, and 30^3 draws of three out of thirty."""
PATTERN_BITS = 8
"""Values whose signs one look-up settles."""


def sign_flip_p_value(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p of the paired sign-flip permutation test of "mean 0"."""
    values = [float(value) for value in differences]
    assert values
    # Sums of the same numbers in another order differ in the last bits; a pattern as extreme must count.
    at_least = abs(math.fsum(values)) - 1e-12 * math.fsum(abs(value) for value in values)
    if len(values) <= EXACT_UP_TO:
        sums = _signed_sums(values)
        return sum(abs(total) >= at_least for total in sums) / len(sums)
    tables = [_signed_sums(values[at : at + PATTERN_BITS]) for at in range(0, len(values), PATTERN_BITS)]
    rng = random.Random(f"signs/{seed}")
    drawn = zip(*(rng.choices(table, k=NUM_SIGN_PATTERNS) for table in tables), strict=True)
    as_extreme: int = sum(abs(sum(parts)) >= at_least for parts in drawn)
    return (as_extreme + 1) / (NUM_SIGN_PATTERNS + 1)


def bootstrap_ci95(differences: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean."""
    values = [float(value) for value in differences]
    assert values
    num = len(values)
    group = _largest_group(num)
    table = _drawn_sums(values, group)
    if group == num:
        totals = table
    else:
        rng = random.Random(f"resamples/{seed}")
        whole, rest = divmod(num, group)
        columns = [rng.choices(table, k=NUM_RESAMPLES) for _ in range(whole)]
        columns += [rng.choices(values, k=NUM_RESAMPLES) for _ in range(rest)]
        totals = [sum(parts) for parts in zip(*columns, strict=True)]
    means = sorted(total / num for total in totals)
    return quantile(means, 0.025), quantile(means, 0.975)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least of sorted values that at least ``share`` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _signed_sums(values: Sequence[float]) -> list[float]:
    """The sums of all 2^n sign patterns."""
    sums = [0.0]
    for value in values:
        sums = [total + value for total in sums] + [total - value for total in sums]
    return sums


def _drawn_sums(values: Sequence[float], group: int) -> list[float]:
    """The sums of all n^group ways to draw ``group`` values with replacement."""
    sums = [0.0]
    for _ in range(group):
        sums = [total + value for total in sums for value in values]
    return sums


def _largest_group(num: int) -> int:
    """How many draws fit into one table, at most all of them."""
    group = 1
    while group < num and num ** (group + 1) <= MAX_TABLE:
        group += 1
    return group
