"""``python -m replay.chaos.hog MEBIBYTES``: take so much memory, say so, and hold it until ended."""

from __future__ import annotations

import signal
import sys

MIB = 1 << 20


def main() -> None:
    held = bytearray(int(sys.argv[1]) * MIB)
    for at in range(0, len(held), 4096):
        held[at] = 1
    sys.stdout.write(f"holds {len(held)} bytes\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
