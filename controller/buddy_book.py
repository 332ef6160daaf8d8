"""The buddies of each slot as of now, kept in the journal: a restart of the controller moves no replica."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping

from controller.buddies import Member, assign_buddies
from controller.records import AgentRecord
from controller.registry import StateStore
from controller.takers import NONE, newest, peer_of
from diloco.recovery_schema import Peer

logger = logging.getLogger(__name__)

PREFIX = "buddies/"
"""Of the keys in the table ``meta``, one per slot."""


class BuddyBook:
    """Assigns buddies anew when the membership has changed."""

    def __init__(self, store: StateStore, meta: Mapping[str, str], *, factor: int, allow_same_node: bool) -> None:
        self._store = store
        self._factor = factor
        self._allow_same_node = allow_same_node
        self._names = _read(meta)
        self._peers: dict[int, tuple[Peer, ...]] = {}
        self._kept = _slots_by_keeper(self._names)
        self.is_due = True
        """A membership has changed since the last `refresh`."""

    @property
    def is_in_use(self) -> bool:
        """Whether anything is to be replicated at all."""
        return self._factor > 0

    def of(self, slot: int | None) -> tuple[Peer, ...]:
        """The buddies of a slot, as of the last `refresh`."""
        return () if slot is None else self._peers.get(slot, ())

    def refresh(self, agents: Mapping[str, AgentRecord]) -> None:
        """Assign if that is due; drained agents are on hosts that somebody else needs, and keep nothing."""
        if not self.is_due:
            return
        self.is_due = False
        found = assign_buddies(
            _members(agents.values()), factor=self._factor, allow_same_node=self._allow_same_node, before=self._names
        )
        for slot, names in found.items():
            if names != self._names.get(slot):
                logger.info("buddies slot=%d agents=%s", slot, ",".join(names) or "none")
                self._names[slot] = names
                self._store.put("meta", f"{PREFIX}{slot}", json.dumps(names))
        self._peers = {
            slot: tuple(peer for name in names if (peer := peer_of(agents[name])) is not None)
            for slot, names in found.items()
        }
        self._kept = _slots_by_keeper(self._names)

    def kept_by(self, agent: AgentRecord, agents: Mapping[str, AgentRecord]) -> tuple[int, ...]:
        """Slots whose replicas an agent keeps: those that it is a buddy of, and, until their new buddies have complete
        ones, those that it was a buddy of."""
        own = self._kept.get(agent.agent_id, frozenset())
        before = {replica.slot for replica in agent.replicas} - own
        return tuple(sorted(own | {slot for slot in before if not self._is_kept(slot, agents)}))

    def _is_kept(self, slot: int, agents: Mapping[str, AgentRecord]) -> bool:
        keepers = [agents[name] for name in self._names.get(slot, ()) if name in agents]
        return any(keeper.active and newest(keeper.replicas, slot) != NONE for keeper in keepers)


def _members(agents: Iterable[AgentRecord]) -> list[Member]:
    return [
        Member(
            agent_id=agent.agent_id,
            node=agent.node,
            slot=agent.slot,
            keeps=agent.keeps_replicas and agent.url is not None and not agent.drained,
        )
        for agent in agents
        if agent.active
    ]


def _slots_by_keeper(names: Mapping[int, tuple[str, ...]]) -> dict[str, frozenset[int]]:
    kept: dict[str, set[int]] = {}
    for slot, keepers in names.items():
        for name in keepers:
            kept.setdefault(name, set()).add(slot)
    return {name: frozenset(slots) for name, slots in kept.items()}


def _read(meta: Mapping[str, str]) -> dict[int, tuple[str, ...]]:
    """What the journal has; an entry that is none is left out, since all of them can be assigned anew."""
    found: dict[int, tuple[str, ...]] = {}
    for key, value in meta.items():
        if not key.startswith(PREFIX):
            continue
        try:
            names = json.loads(value)
            found[int(key.removeprefix(PREFIX))] = tuple(str(name) for name in names)
        except (ValueError, TypeError):
            logger.warning("buddies of the journal cannot be read key=%s", key)
    return found
