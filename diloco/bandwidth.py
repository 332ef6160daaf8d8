"""Bandwidths as people write them: ``1Gbit/s``, ``250 Mbit/s``, ``10GB/s``.

Bits and bytes are told apart by ``bit`` and ``B``; prefixes are powers of 1000, as for every network. Other spellings
(``mbps`` means bits to some programs and bytes to others) are refused.
"""

from __future__ import annotations

import re

FORM = re.compile(r"(\d+(?:\.\d+)?)\s?([kMGT]?)(bit|B)/s")
FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BITS_PER_BYTE = 8


def bytes_per_s(text: str) -> float:
    """What the text says, in bytes per second.

    Raises:
        ValueError: it has another form, or is zero.
    """
    found = FORM.fullmatch(text.strip())
    value = float(found[1]) * FACTORS[found[2]] / (BITS_PER_BYTE if found[3] == "bit" else 1) if found else 0.0
    if not value:
        raise ValueError(f"{text!r} is no bandwidth: write 1Gbit/s, 250Mbit/s or 125MB/s")
    return value
