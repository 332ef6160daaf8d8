"""What a controller makes of a damaged journal: tried on a copy, beside the fleet."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from replay.chaos.config import ChaosSettings
from replay.chaos.corrupt import flip_bytes
from replay.processes import Children
from service.child import module_command, module_environment

DEADLINE_S = 60.0
REFUSED = frozenset({2, 3, 4})
"""Exit codes of what a user is told."""


@dataclass(frozen=True, slots=True)
class Probed:
    """How it went."""

    ok: bool
    """It either works, or ended by itself and said why."""
    detail: str


def copy_journal(journal: Path, directory: Path) -> Path:
    """With the log of what is not in it yet, as a machine that loses its power would leave it."""
    directory.mkdir(parents=True)
    for path in journal.parent.glob(f"{journal.name}*"):
        if path.is_file() and not path.name.endswith("-shm"):
            shutil.copy(path, directory / path.name)
    return directory / journal.name


async def probe_journal(journal: Path, directory: Path, *, settings: ChaosSettings, seed: int) -> Probed:
    """Copy the journal, flip some bytes of the copy and start a controller on it, that is ended again."""
    copy = await asyncio.to_thread(copy_journal, journal, directory)
    _, offsets = await asyncio.to_thread(flip_bytes, [copy], num_bytes=settings.corrupt_bytes, seed=seed)
    what = f"{len(offsets)} bytes of a copy of the journal"
    children, log = Children(), directory / "controller.log"
    command = [*module_command("wadiloco"), "controller", "--port", "0", "--journal", str(copy)]
    try:
        child = children.start("probe", command, log=log, env=module_environment())
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + DEADLINE_S
        while loop.time() < deadline_s:
            if child.exit_code is not None:
                said = child.log_tail().strip().splitlines()[-1:] or ["nothing"]
                ok = child.exit_code in REFUSED
                return Probed(ok, f"{what}: refused with exit code {child.exit_code}, saying: {said[0].strip()[:300]}")
            if "listening service=controller" in log.read_text(errors="replace"):
                return Probed(True, f"{what}: a controller works on it")
            await asyncio.sleep(0.1)
        return Probed(False, f"{what}: neither started nor ended within {DEADLINE_S:g} s")
    finally:
        children.stop(deadline_s=5.0)
