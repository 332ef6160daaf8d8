"""Entry point of ``wadiloco island``."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.agent.config import IslandSettings
from diloco.agent.preflight import check_host
from service.log import configure_logging
from service.server import serve
from service.settings import load_settings


def main(argv: Sequence[str]) -> int:
    """Train until a signal; returns 0 after a clean stop, or after a dry run.

    Raises:
        WadilocoError: the settings cannot work on this host, or no worker could be started.
    """
    settings = load_settings(IslandSettings, argv)
    configure_logging(settings.log_level)
    check_host(settings)
    if settings.dry_run:
        from diloco.agent.dry_run import print_dry_run  # torch, which the agent itself needs not

        return print_dry_run(settings)
    from diloco.agent.app import build  # packages that are known to be there only now

    app, agent = build(settings)
    serve(app, settings)
    if agent.state.fatal is not None:
        raise agent.state.fatal
    return 0
