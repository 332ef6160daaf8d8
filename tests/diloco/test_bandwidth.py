from __future__ import annotations

import pytest

from diloco.bandwidth import bytes_per_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1Gbit/s", 125e6),
        ("250 Mbit/s", 31.25e6),
        ("2.5Gbit/s", 312.5e6),
        ("8bit/s", 1.0),
        ("10GB/s", 10e9),
        ("64kB/s", 64e3),
        (" 1Tbit/s ", 125e9),
    ],
)
def test_bits_and_bytes_are_told_apart(text: str, expected: float) -> None:
    assert bytes_per_s(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "1", "1Gbit", "1gbit/s", "1Gbps", "1GiB/s", "-1Gbit/s", "0Mbit/s", "nanB/s"])
def test_other_forms_are_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(ValueError, match="is no bandwidth: write 1Gbit/s"):
        bytes_per_s(text)
