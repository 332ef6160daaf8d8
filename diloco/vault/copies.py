"""Copying a generation from one vault to another, while its writer goes on."""

from __future__ import annotations

from diloco.vault.errors import CorruptError
from diloco.vault.file import VaultFile, copy_into
from diloco.vault.layout import Generation, RegionNeed


def needs_of(generation: Generation) -> list[RegionNeed]:
    """Regions for this generation alone."""
    return [RegionNeed(part.length, 1) for part in generation.parts]


def copy_generation(source: VaultFile, generation: Generation, target: VaultFile) -> None:
    """Commit it in ``target``, which has room for it, in place of whatever is there.

    Raises:
        CorruptError: its parts are not what it says: the writer has come in between, or it was corrupt before.
        VaultFullError: there is no room.
    """
    target.begin(keep=None)
    regions = target.reserve([part.length for part in generation.parts], kept=[])
    parts = []
    for part, region in zip(generation.parts, regions, strict=True):
        made = copy_into(target.region(region), [source.view(part)])
        if made.digest != part.digest:
            raise CorruptError(
                f"part {part.name} of generation {generation.number} does not match its digest", field="vault"
            )
        parts.append(part.model_copy(update={"region": region}))
    target.commit(generation.model_copy(update={"parts": tuple(parts)}))
