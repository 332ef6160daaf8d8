"""The agents of the fleet, kept so that each question about them costs the same with five as with five thousand.

A heartbeat changes neither slot nor membership, and touches one entry. What is asked every tick ("who was silent for
too long?") is a heap with one entry per agent: the time noted there is never later than the true one, and an entry that
comes up too early is put back, which happens to an agent once per lease.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from controller.records import AgentRecord, Membership


class Deadlines:
    """Names and the times at which they are to be looked at."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._names: set[str] = set()

    def watch(self, name: str, due_s: float) -> None:
        if name not in self._names:
            self._names.add(name)
            heapq.heappush(self._heap, (due_s, name))

    def pop_due(self, now_s: float, due_of: Callable[[str], float | None]) -> list[str]:
        """Names whose true time is past; ``due_of`` tells it, or None for a name that is no longer of interest."""
        found = []
        while self._heap and self._heap[0][0] < now_s:
            _, name = heapq.heappop(self._heap)
            due_s = due_of(name)
            if due_s is not None and due_s >= now_s:
                heapq.heappush(self._heap, (due_s, name))
                continue
            self._names.discard(name)
            if due_s is not None:
                found.append(name)
        return found


class Roster(Mapping[str, AgentRecord]):
    """Agents by id, by slot, and by what they wait for."""

    def __init__(self, agents: Iterable[AgentRecord], *, num_slots: int, lease_timeout_s: float) -> None:
        self._num_slots = num_slots
        self._lease_timeout_s = lease_timeout_s
        self._agents: dict[str, AgentRecord] = {}
        self._holders: dict[int, str] = {}
        self._free = list(range(num_slots))
        self._held_last: dict[int, dict[str, None]] = {}
        self._waiting: dict[str, None] = {}
        self._leases = Deadlines()
        self._forfeits = Deadlines()
        for agent in agents:
            self.keep(agent)

    def __getitem__(self, agent_id: str) -> AgentRecord:
        return self._agents[agent_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)

    def keep(self, agent: AgentRecord) -> AgentRecord | None:
        """Take the newest record of an agent; returns the one before."""
        before = self._agents.get(agent.agent_id)
        self._agents[agent.agent_id] = agent
        if before is None or _place(before) != _place(agent):
            self._move(before, agent)
        return before

    def drop(self, agent_id: str) -> None:
        """Forget an agent that has no slot."""
        agent = self._agents.pop(agent_id)
        if agent.last_slot is not None:
            self._forget_last(agent.last_slot, agent_id)
        self._waiting.pop(agent_id, None)

    def _move(self, before: AgentRecord | None, agent: AgentRecord) -> None:
        name = agent.agent_id
        if before is not None and before.slot is not None and before.slot != agent.slot:
            self._release(before.slot, name)
        if agent.slot is not None and self._holders.get(agent.slot) != name:
            self._hold(agent.slot, name)
        if before is not None and before.last_slot is not None and before.last_slot != agent.last_slot:
            self._forget_last(before.last_slot, name)
        if agent.last_slot is not None:
            self._held_last.setdefault(agent.last_slot, {})[name] = None
        self._waiting.pop(name, None)
        if agent.active and agent.slot is None and not agent.drained:
            self._waiting[name] = None
        if agent.active:
            self._leases.watch(name, agent.last_beat_s + self._lease_timeout_s)
        elif agent.slot is not None:
            self._forfeits.watch(name, agent.last_beat_s + 2 * self._lease_timeout_s)

    def _hold(self, slot: int, name: str) -> None:
        self._holders[slot] = name
        at = bisect_left(self._free, slot)
        if at < len(self._free) and self._free[at] == slot:
            del self._free[at]

    def _release(self, slot: int, name: str) -> None:
        if self._holders.get(slot) == name:
            del self._holders[slot]
            if slot < self._num_slots:
                insort(self._free, slot)

    def _forget_last(self, slot: int, name: str) -> None:
        held = self._held_last[slot]
        held.pop(name, None)
        if not held:
            del self._held_last[slot]

    def holder_of(self, slot: int) -> AgentRecord | None:
        """Who has a slot, or has it kept for itself while it is lost."""
        name = self._holders.get(slot)
        return None if name is None else self._agents[name]

    @property
    def holders(self) -> list[AgentRecord]:
        """Agents with a slot, by slot."""
        return [self._agents[name] for _, name in sorted(self._holders.items())]

    @property
    def free(self) -> Sequence[int]:
        """Slots that nobody has, ascending."""
        return self._free

    @property
    def lowest_free(self) -> int | None:
        return self._free[0] if self._free else None

    def held_last(self, slot: int) -> list[AgentRecord]:
        """Agents whose last slot is this one."""
        return [self._agents[name] for name in self._held_last.get(slot, ())]

    @property
    def num_never_taken(self) -> int:
        """Slots that are nobody's last one."""
        return self._num_slots - sum(slot < self._num_slots for slot in self._held_last)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[AgentRecord]:
        """Agents that would take a slot, the longest-waiting first."""
        found = [self._agents[name] for name in self._waiting]
        return sorted(found, key=lambda agent: (agent.registered_s, agent.agent_id))

    def pop_silent(self, now_s: float) -> list[AgentRecord]:
        """Active agents that were silent for longer than a lease; each is told once until it changes."""
        return [self._agents[name] for name in self._leases.pop_due(now_s, self._lease_end_s)]

    def pop_forfeit(self, now_s: float) -> list[AgentRecord]:
        """Lost agents whose slot is no longer kept for them."""
        return [self._agents[name] for name in self._forfeits.pop_due(now_s, self._forfeit_s)]

    def is_forfeit(self, agent: AgentRecord, now_s: float) -> bool:
        forfeit_s = self._forfeit_s(agent.agent_id)
        return forfeit_s is not None and now_s > forfeit_s

    def _lease_end_s(self, name: str) -> float | None:
        agent = self._agents.get(name)
        return agent.last_beat_s + self._lease_timeout_s if agent is not None and agent.active else None

    def _forfeit_s(self, name: str) -> float | None:
        agent = self._agents.get(name)
        if agent is None or agent.active or agent.slot is None:
            return None
        return agent.last_beat_s + 2 * self._lease_timeout_s


def _place(agent: AgentRecord) -> tuple[Membership, int | None, int | None, bool]:
    """What the indexes are made of."""
    return agent.membership, agent.slot, agent.last_slot, agent.drained
