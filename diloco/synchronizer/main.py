"""Entry point of ``wadiloco synchronizer``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diloco.synchronizer.app import create_app
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.storage import owned
from service.log import configure_logging
from service.server import serve
from service.settings import load_settings


def main(argv: Sequence[str]) -> int:
    settings = load_settings(SynchronizerSettings, argv)
    configure_logging(settings.log_level)
    torch.set_num_threads(settings.threads)
    with owned(settings.directory):
        serve(create_app(settings), settings, many_clients=True)
    return 0
