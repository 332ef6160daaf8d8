"""``wadiloco sidecar``: watch one vLLM server until SIGINT or SIGTERM."""

from __future__ import annotations

from collections.abc import Sequence

from service.log import configure_logging
from service.server import serve
from service.settings import load_settings
from sidecar.app import create_app
from sidecar.config import SidecarSettings


def main(argv: Sequence[str]) -> int:
    settings = load_settings(SidecarSettings, argv)
    configure_logging(settings.log_level)
    serve(create_app(settings), settings)
    return 0
