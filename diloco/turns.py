"""Which fragment syncs in which round. Pure.

Rounds of the run are numbered from 0, and round R syncs the fragment R mod F. A fragment's own version is the number of
outer steps taken on it: with all in turn, round R takes it from R div F to the next. So the number of a round, and a
fragment with its version, say the same, and the versions of the fragments say which round is next: the schedule has no
state of its own, and survives whatever the versions survive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """A round of the run, as the fragment that it syncs counts."""

    fragment: int
    version: int
    """Of the fragment when the round opens."""


def place_of(round_number: int, num_fragments: int) -> Place:
    return Place(fragment=round_number % num_fragments, version=round_number // num_fragments)


def round_of(place: Place, num_fragments: int) -> int:
    return place.version * num_fragments + place.fragment


def next_round(versions: Iterable[int]) -> int:
    """The first round of the run that has not been, by the versions of the fragments: all before it have."""
    known = dict(enumerate(versions))
    return next_round_among(known, len(known))


def next_round_among(versions: Mapping[int, int], num_fragments: int) -> int:
    """The same among some of the fragments, of which these are the versions."""
    return min(round_of(Place(fragment, version), num_fragments) for fragment, version in versions.items())
