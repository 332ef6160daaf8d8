"""Where lines of the plugin go."""

from __future__ import annotations

import logging
import sys

VLLM = "vllm"


def plugin_logger(name: str) -> logging.Logger:
    """The logger of a module: within vLLM a child of vLLM's.

    vLLM gives a handler and a level to its own logger alone, and leaves the root's without a handler; a line of any
    other logger is lost in its processes.
    """
    return logging.getLogger(f"{VLLM}.wadiloco.{name.rpartition('.')[2]}" if VLLM in sys.modules else name)
