"""Who keeps replicas of whose state: each slot has up to two buddies on other hosts than its holder's. Pure.

Spares are preferred, since one of them takes over when a holder is lost, and has nothing to fetch then. A buddy costs
what it keeps already, and one more if it trains a slot itself:

    cost(agent) = replicas that it keeps + (1 if it holds a slot)

Each slot takes the cheapest agent that it may have, of two equal ones a spare. What there is stays: a buddy is given up
only where it cannot be one any more (it is gone, took the slot itself, came to the holder's host), or where another one
is cheaper by two at least, so that the move leaves the two less apart.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MAX_FACTOR = 2
WORTH_A_MOVE = 2

Entry = tuple[int, bool, str]
"""Cost, whether it holds a slot, and name: the order in which agents are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An active agent."""

    agent_id: str
    node: str
    slot: int | None
    """That it holds."""
    keeps: bool
    """It can keep replicas, and is to."""


def assign_buddies(
    members: Iterable[Member],
    *,
    factor: int,
    allow_same_node: bool,
    before: Mapping[int, tuple[str, ...]],
) -> dict[int, tuple[str, ...]]:
    """The buddies of each held slot, fewer than ``factor`` (none at worst) where the fleet has not so many.

    The order within a slot is that in which they came. Takes O(n log n) for n agents, unless they share few hosts.
    """
    found = _Assignment(members, allow_same_node=allow_same_node)
    if factor > 0:
        found.keep(before, factor=factor)
        found.fill(factor=factor)
        found.balance()
    return {slot: tuple(buddies) for slot, buddies in found.buddies.items()}


class _Assignment:
    def __init__(self, members: Iterable[Member], *, allow_same_node: bool) -> None:
        everybody = list(members)
        self._allow_same_node = allow_same_node
        self._members = {member.agent_id: member for member in everybody}
        self._holders = {member.slot: member for member in everybody if member.slot is not None}
        self._load = Counter[str]()
        self.buddies: dict[int, list[str]] = {slot: [] for slot in sorted(self._holders)}
        self._heap = [self._entry(m.agent_id) for m in everybody if m.keeps]
        heapq.heapify(self._heap)

    def keep(self, before: Mapping[int, tuple[str, ...]], *, factor: int) -> None:
        for slot in self.buddies:
            for agent_id in before.get(slot, ()):
                if len(self.buddies[slot]) < factor and self._can_keep(agent_id, slot):
                    self._add(slot, agent_id)

    def fill(self, *, factor: int) -> None:
        for nth in range(factor):
            for slot, buddies in self.buddies.items():
                if len(buddies) == nth and (chosen := self._cheapest(slot)) is not None:
                    self._add(slot, chosen)

    def balance(self) -> None:
        """Move slots from the dearest agents to the cheapest; each move lowers the sum of squares of the costs."""
        moved = True
        while moved:
            moved = sum(self._move_one(slot) for slot in self.buddies) > 0

    def _move_one(self, slot: int) -> bool:
        buddies = self.buddies[slot]
        for index, agent_id in enumerate(buddies):
            del buddies[index]
            other = self._cheapest(slot)
            buddies.insert(index, agent_id)
            if other is None or other == agent_id or self._cost(agent_id) - self._cost(other) < WORTH_A_MOVE:
                continue
            self._load[agent_id] -= 1
            self._push(agent_id)
            buddies[index] = other
            self._load[other] += 1
            self._push(other)
            return True
        return False

    def _cheapest(self, slot: int) -> str | None:
        """The first that the slot may have: those before it in the heap are put back."""
        passed: list[Entry] = []
        found = None
        for entry in self._in_order():
            passed.append(entry)
            if self._can_keep(entry[2], slot):
                found = entry[2]
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def _in_order(self) -> Iterator[Entry]:
        """Agents from the cheapest on, taken out; entries whose cost is no longer true are dropped."""
        last: Entry | None = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry != last and entry == self._entry(entry[2]):
                last = entry
                yield entry

    def _can_keep(self, agent_id: str, slot: int) -> bool:
        member, holder = self._members.get(agent_id), self._holders[slot]
        if member is None or not member.keeps or agent_id == holder.agent_id or agent_id in self.buddies[slot]:
            return False
        if self._allow_same_node:
            return True
        taken = {self._members[other].node for other in self.buddies[slot]}
        return member.node != holder.node and member.node not in taken

    def _cost(self, agent_id: str) -> int:
        return self._load[agent_id] + (self._members[agent_id].slot is not None)

    def _add(self, slot: int, agent_id: str) -> None:
        self.buddies[slot].append(agent_id)
        self._load[agent_id] += 1
        self._push(agent_id)

    def _entry(self, agent_id: str) -> Entry:
        return self._cost(agent_id), self._members[agent_id].slot is not None, agent_id

    def _push(self, agent_id: str) -> None:
        heapq.heappush(self._heap, self._entry(agent_id))
