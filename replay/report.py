"""The report of a replay for people: Markdown, and the same table for a terminal."""

from __future__ import annotations

from rich.table import Table

from replay.summary import Summary


def render_markdown(summary: Summary) -> str:
    """``report.md``."""
    raise NotImplementedError


def render_table(summary: Summary) -> Table:
    """The table per policy for a terminal."""
    raise NotImplementedError
