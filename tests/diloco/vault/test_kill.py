"""A worker that is killed at any moment, and goes on from its vault, ends with the weights of one that was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.schema import Rung
from tests.diloco.vault.conftest import Slot, StartSlot, syncs_at, until_version

pytestmark = pytest.mark.integration

Serve = Callable[..., str]
STEPS = (150, 300, 450)


def undisturbed(start_slot: StartSlot, url: str, **options: Any) -> list[str]:
    overlap_steps = options.pop("overlap_steps", None)
    slot = start_slot(url, name="undisturbed", **options)
    slot.plan(*syncs_at(*STEPS, overlap_steps=overlap_steps))
    slot.train()
    return until_version(url, len(STEPS))


def begun(start_slot: StartSlot, url: str, **options: Any) -> Slot:
    overlap_steps = options.pop("overlap_steps", None)
    slot = start_slot(url, name="killed", **options)
    slot.plan(*syncs_at(*STEPS, overlap_steps=overlap_steps))
    slot.train()
    return slot


VARIANTS: dict[str, dict[str, Any]] = {
    "blocking": {},
    "overlapped": {"overlap_steps": 7},
    "int4": {"codec": "int4"},
    "int4-fragments-overlapped": {"codec": "int4", "num_fragments": 2, "overlap_steps": 7},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=list(VARIANTS))
def test_killed_between_syncs_it_ends_with_the_same_weights(
    serve: Serve, start_slot: StartSlot, tmp_path: Path, variant: str
) -> None:
    options = VARIANTS[variant]
    wanted = undisturbed(start_slot, serve(tmp_path / "one", quorum=1), **options)
    url = serve(tmp_path / "two", quorum=1)
    slot = begun(start_slot, url, **options)
    for step in (3, 100, 152, 280, 400):
        slot.until_step(step)
        slot.kill()
        before = slot.step()
        restored = slot.restart()
        assert (restored.rung, restored.step, restored.lost) == (Rung.VAULT, before, ""), restored.refused
    assert until_version(url, len(STEPS)) == wanted
