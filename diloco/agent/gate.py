"""The gate of the server on the same hardware, for the agent's own transfers; needs no torch."""

from __future__ import annotations

from pathlib import Path

from diloco.lull import Gate
from sidecar.vllm_plugin.gate_reader import GateReader


def open_gate(directory: Path | None) -> Gate | None:
    """The reader of the gate in a folder, which need not be there yet; None where there is no server."""
    return None if directory is None else GateReader(directory)
