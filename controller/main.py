"""``wadiloco controller``: one per fleet."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from controller.app import build_controller_app
from controller.config import ControllerSettings
from controller.heap import spare_heap
from service.log import configure_logging
from service.server import serve
from service.settings import load_settings

SWITCH_S = 0.001
"""After which the event loop lets the journal's thread go on: five times as often as usual, for a tick waits for it."""


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ControllerSettings, argv)
    configure_logging(settings.log_level)
    app = build_controller_app(settings)
    spare_heap()
    sys.setswitchinterval(SWITCH_S)
    serve(app, settings, many_clients=True)
    return 0
