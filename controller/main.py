"""``wadiloco controller``: one per fleet."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from controller.app import build_controller_app
from controller.config import ControllerSettings
from service.log import configure_logging
from service.server import serve
from service.settings import load_settings


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ControllerSettings, argv)
    configure_logging(settings.log_level)
    app = build_controller_app(settings)
    freeze_heap()
    serve(app, settings)
    return 0


def freeze_heap() -> None:
    """Spare the garbage collector what lives as long as the process: to look through it took 70 ms within a tick."""
    gc.collect()
    gc.freeze()
