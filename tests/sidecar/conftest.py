"""Two authorities: one that the test trusts, and another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "stranger")
