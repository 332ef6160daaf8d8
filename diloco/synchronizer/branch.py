"""A run that goes back: its newest generation is damaged, and from the one before it another history begins.

Islands may hold versions of the history that is lost, under the same numbers. So the run that goes on gets an identity
of its own, written into the generation that it goes on from before anything else is.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from diloco.synchronizer.storage import read_part, write_durably
from diloco.tensorfile import LENGTH, parse_header, reheaded, sealed, unsealed
from service.files import open_regular


def rename_run(path: Path, run: str) -> None:
    """Give an intact generation's file another identity of its run; a crash leaves it as it was, or as it has to be."""
    length = LENGTH.size + int.from_bytes(read_part(path, offset=0, length=LENGTH.size), "little")
    header = parse_header(read_part(path, offset=0, length=length))
    metadata = unsealed(header.metadata) | {"run": run}
    with (
        os.fdopen(open_regular(path), "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as whole,
        whole[header.data_offset :] as data,
    ):
        write_durably(path, (reheaded(header, sealed(metadata)), data))
