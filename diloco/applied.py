"""Whether global parameters have a contribution in them, as the synchronizer says of it. Pure.

A contribution is known by its slot, the version that it was against, and the sha-256 of its bytes. The synchronizer
keeps, for each slot and for ever, which one it applied last (`diloco.schema.Applied`). That is enough, for an island
settles what became of one contribution before it pushes the next: what it does not know of is the last one at most.

Where the synchronizer does not say, because it is of an older version, the version decides: a contribution is taken to
be in every version after the round that took it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pydantic import ValidationError

from diloco.schema import APPLIED_HEADER, Applied
from service.errors import InputError


class Contributed(Protocol):
    """A contribution of this slot."""

    @property
    def round(self) -> int: ...

    @property
    def digest(self) -> str | None: ...


class Pulled(NamedTuple):
    """What was downloaded."""

    version: int
    run: str | None = None
    """Identity of the run that it belongs to; None of an older synchronizer."""
    applied: tuple[Applied, ...] | None = None
    """What the slot that asked contributed last of all that is in it, if it ever did; None where nobody says."""

    def has(self, contribution: Contributed) -> bool | None:
        """Whether it has the contribution in it; None where nobody says."""
        if self.applied is None or contribution.digest is None:
            return None
        return any((one.round, one.digest) == (contribution.round, contribution.digest) for one in self.applied)


def format_applied(applied: Applied | None) -> str:
    """As it travels in `APPLIED_HEADER`."""
    return "" if applied is None else f"{applied.round},{applied.into},{applied.digest}"


def parse_applied(text: str | None) -> tuple[Applied, ...] | None:
    """What the header said: None where there was none, empty where nothing was applied.

    Raises:
        InputError: it is neither.
    """
    if not text:
        return None if text is None else ()
    try:
        against, into, digest = text.split(",")
        return (Applied(round=int(against), into=int(into), digest=digest),)
    except (ValueError, ValidationError) as exc:
        raise InputError(
            f"is {text[:100]!r}", field=APPLIED_HEADER, remedy="check that both ends run the same version"
        ) from exc
