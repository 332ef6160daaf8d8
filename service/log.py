"""Logging of a process. Only entry points call this; modules take ``logging.getLogger(__name__)``."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
# Lines per HTTP request, connection and phase of the server say nothing that the metrics or our own lines do not.
CHATTY = ("httpx", "httpcore", "uvicorn")


def configure_logging(level: str) -> None:
    """Log to standard error at ``level`` (debug, info, warning, error)."""
    logging.basicConfig(level=level.upper(), format=FORMAT, stream=sys.stderr, force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
