"""Starting this project's own modules as child processes, whatever the working directory holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages lie: site-packages, or a checkout."""


def module_command(module: str) -> list[str]:
    """``python -m module``, without the working directory on the path: a folder there may have a package's name."""
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """Environment that lets `module_command` find the packages that this very process runs."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(ROOT) if not inherited else f"{ROOT}{os.pathsep}{inherited}"}
