"""Where the agents of a fleet that is started here keep their snapshots: in shared memory, and gone with the fleet.

An agent that is killed leaves its snapshots for its successor, so nobody but the fleet's owner can tell when they are
not needed any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.agent.vaults import SHARED_MEMORY


@contextmanager
def vault_folder() -> Iterator[Path]:
    """A new folder of this process, removed at the end."""
    folder = _folder_of(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)  # of a process that had this number before
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        remove_folder_of(os.getpid())


def remove_folder_of(pid: int) -> None:
    """What that process did not remove itself."""
    shutil.rmtree(_folder_of(pid), ignore_errors=True)


def _folder_of(pid: int) -> Path:
    return (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"wadiloco-chaos-{pid}"
