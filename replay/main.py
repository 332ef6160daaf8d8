"""``wadiloco replay``: replay a traffic trace under each policy and compare."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from replay.caveats import caveats
from replay.config import ReplaySettings
from replay.experiment import plan_runs
from replay.progress import ProgressView
from replay.report import SYNC_EXCESS, render_table
from replay.session import REPORT, SUMMARY, TIMELINE, announce, run_session
from replay.summary import Summary
from service.log import configure_logging
from service.settings import load_settings


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ReplaySettings, argv)
    configure_logging("warning" if settings.log_level == "info" else settings.log_level)
    console = Console(stderr=False)
    summary = run(settings, console)
    show(summary, settings, console)
    return 0


def run(settings: ReplaySettings, console: Console) -> Summary:
    """Run the session; SIGINT and SIGTERM end it, and every process that it started, with one message."""
    console.print(announce(settings), highlight=False)
    with ProgressView(console, len(plan_runs(settings))) as view:
        return asyncio.run(_until_signal(settings, view))


def show(summary: Summary, settings: ReplaySettings, console: Console) -> None:
    """The table, what it does not prove, and where the rest is."""
    console.print(render_table(summary))
    console.print(f"Sync excess: {SYNC_EXCESS}.", highlight=False)
    for caveat in caveats(summary):
        console.print(f"- {caveat}", highlight=False)
    console.print()
    for name in (SUMMARY, REPORT, TIMELINE):
        console.print(f"  {settings.out / name}", highlight=False)


async def _until_signal(settings: ReplaySettings, view: ProgressView) -> Summary:
    session = asyncio.create_task(run_session(settings, view))
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def interrupt() -> None:
        # Only the first signal counts: a second one would tear the clean-up apart and leave processes behind.
        if not interrupted.is_set():
            interrupted.set()
            sys.stderr.write("\nstopping: ending the processes of this replay\n")
            session.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await session
    except asyncio.CancelledError as exc:
        raise KeyboardInterrupt from exc
