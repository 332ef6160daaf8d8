"""``wadiloco chaos``: break a training fleet of this machine on purpose, and tell what each fault cost."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from replay.chaos.config import ChaosSettings
from replay.chaos.guardian import guarded
from replay.chaos.procfs import adopt_orphans
from replay.chaos.record import ChaosSummary, render_report
from replay.chaos.session import REPORT, RESULT, run_chaos
from service.log import configure_logging
from service.settings import load_settings

NOT_RECOVERED = 1


def main(argv: Sequence[str]) -> int:
    """0 when everything that was planned was injected and is over; 1 when something did not recover."""
    settings = load_settings(ChaosSettings, one_fault_each(argv))
    configure_logging("warning" if settings.log_level == "info" else settings.log_level)
    return guarded(lambda: _run(settings))


def one_fault_each(argv: Sequence[str]) -> list[str]:
    """The commas within each ``--at`` as colons: those between several would look the same."""
    found: list[str] = []
    for argument in argv:
        is_value = bool(found) and found[-1] == "--at"
        found.append(argument.replace(",", ":") if is_value or argument.startswith("--at=") else argument)
    return found


def _run(settings: ChaosSettings) -> int:
    adopt_orphans()
    summary = asyncio.run(_until_signal(settings))
    if settings.as_json:
        sys.stdout.write(summary.model_dump_json(indent=2) + "\n")
    else:
        sys.stdout.write(render_report(summary))
        sys.stdout.write(f"{settings.out / RESULT}\n{settings.out / REPORT}\n")
    return 0 if summary.passed else NOT_RECOVERED


async def _until_signal(settings: ChaosSettings) -> ChaosSummary:
    session = asyncio.create_task(run_chaos(settings, _tell))
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def interrupt() -> None:
        # Only the first signal counts: a second one would tear the clean-up apart and leave processes behind.
        if not interrupted.is_set():
            interrupted.set()
            _tell("stopping: ending the processes of this run")
            session.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await session
    except asyncio.CancelledError as exc:
        raise KeyboardInterrupt from exc


def _tell(text: str) -> None:
    """How it goes, beside the result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
