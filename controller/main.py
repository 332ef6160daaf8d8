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
    spare_heap()
    serve(app, settings, many_clients=True)
    return 0


GC_THRESHOLDS = (100_000, 50, 100)
"""Containers made since, and younger collections since. Samples make two hundred thousand per second of a large fleet,
none of them in a cycle; by the usual thresholds, looking through them took as long as reading them."""


def spare_heap() -> None:
    """Spare the garbage collector what lives as long as the process (to look through it took 70 ms within a tick), and
    what ends by itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
