"""``wadiloco demo``: the whole loop on this machine, with nothing to configure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from replay.config import DemoSettings
from replay.experiment import RUNS
from replay.main import run, show
from replay.session import SUMMARY
from service.errors import ConfigError
from service.log import configure_logging
from service.settings import load_settings

INTRODUCTION = """\
[bold]WA-DiLoCo demo[/bold]: {servers} under the traffic of [bold]{trace}[/bold],
and training islands on the same cores. The same {duration:g} s run once per policy:
{policies}. Each may spend {syncs} outer syncs. Objective: {slo}.
"""


def main(argv: Sequence[str]) -> int:
    settings = load_settings(DemoSettings, argv)
    configure_logging("warning" if settings.log_level == "info" else settings.log_level)
    console = Console()
    set_aside(settings.out, console)
    servers = (
        f"{len(settings.server)} vLLM servers" if settings.server else f"{settings.local_servers} vLLM servers (CPU)"
    )
    console.print(
        INTRODUCTION.format(
            servers=servers,
            trace=settings.trace.name,
            duration=settings.duration_s,
            policies=", ".join(settings.policies),
            syncs=settings.outer_syncs,
            slo=settings.slo,
        )
    )
    summary = run(settings, console)
    show(summary, settings, console)
    return 0


def set_aside(out: Path, console: Console) -> None:
    """Keep the results of an earlier demo under another name."""
    if not (out / SUMMARY).exists() and not any((out / RUNS).glob("*-seed*")):
        return
    out = out.resolve()
    kept = next(path for number in itertools.count(1) if not (path := out.with_name(f"{out.name}-{number}")).exists())
    try:
        out.rename(kept)
    except OSError as exc:
        raise ConfigError(
            f"{out} holds an earlier replay and cannot be renamed: {exc.strerror or exc}", field="out"
        ) from exc
    console.print(f"The earlier results are kept in {kept}.\n", highlight=False)
