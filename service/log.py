"""Logging of a process. Only entry points call this; modules take ``logging.getLogger(__name__)``."""

from __future__ import annotations

import asyncio
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
    logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not the traceback of each request that a stop cancels: the server says before how many there are."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
