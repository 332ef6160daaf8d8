"""Who has reported of an open round, kept up as reports come.

An entry tells it, too, by going through all its reports: a thousand times a thousand of them in a large round.
"""

from __future__ import annotations

from collections.abc import Set

from controller.records import RoundEntry


class Tally:
    """Of one round. The slots that it expects do not change once it is open."""

    __slots__ = ("_missing", "_reported")

    def __init__(self, entry: RoundEntry) -> None:
        self._reported = set(entry.reported)
        self._missing = dict.fromkeys(entry.missing)

    def add(self, slot: int) -> None:
        self._reported.add(slot)
        self._missing.pop(slot, None)

    @property
    def reported(self) -> Set[int]:
        return self._reported

    @property
    def missing(self) -> Set[int]:
        """In the order in which the round expects them."""
        return self._missing.keys()


class Tallies:
    """Of the rounds that are open, by id."""

    def __init__(self) -> None:
        self._of: dict[int, Tally] = {}

    def of(self, entry: RoundEntry) -> Tally:
        """That of an open round is kept from now on; one of a round that is closed is made for the moment."""
        if entry.closed_s is not None:
            return Tally(entry)
        tally = self._of.get(entry.id)
        if tally is None:
            tally = self._of[entry.id] = Tally(entry)
        return tally

    def drop(self, number: int) -> None:
        """The round was closed, or is no longer known."""
        self._of.pop(number, None)
