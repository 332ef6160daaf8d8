"""What syncs would have cost before a restart: read back from the journal's samples, in slices beside the fleet.

Of the servers that islands are bound to, and of the newest `MAX_ROWS` rows: a fleet whose journal has more of them in
half an hour is known from less of it. A slice takes some 20 ms of a thread.

Then every group learns anew from all that there is, one after the other: that of the whole fleet in synchronous mode,
that of each island in per_island mode. Some 40 ms of a thread each, so that a thousand are done in two minutes; until
its turn comes, a group goes on with what it has learned since the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from pydantic import ValidationError

from controller.core import Controller
from controller.costs import HISTORY_S, ServerCosts, learn
from controller.journal_reader import Reader
from controller.policy.base import Binding, bound_names
from controller.schema import Mode
from controller.state import FleetState
from controller.view import build_view
from service.errors import WadilocoError
from sidecar.schema import LoadSample

logger = logging.getLogger(__name__)

MAX_ROWS = 300_000
SLICE_ROWS = 5_000
PAUSE_S = 0.05
"""Between two slices: the rest of the process comes first."""


class Recall:
    """Reads the past back once for each state that this controller works on."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._done_for: FleetState | None = None

    async def tick(self) -> None:
        """Read, where that is still to be done; what cannot be read is told once and left."""
        if not self._controller.has_state or self._controller.state is self._done_for:
            return
        state, now_s = self._controller.state, self._controller.clock()
        names = bound_names(build_view(state, now_s, with_costs=False))
        if not names:
            return
        self._done_for = state
        try:
            past = await read_past(state.reader, names, since_s=now_s - HISTORY_S, until_s=now_s)
        except WadilocoError as exc:
            logger.warning("what syncs cost before the start cannot be read back error=%s", exc)
            return
        state.costs.recall(past, now_s=self._controller.clock())
        logger.info("costs read back from the journal servers=%d of=%d", len(past), len(names))
        num_learned = await self._relearn(state)
        logger.info("costs learned anew groups=%d", num_learned)

    async def _relearn(self, state: FleetState) -> int:
        """Show every group its past; how many there were."""
        num_learned = 0
        for group in groups_of(state, self._controller.clock()):
            if not self._controller.has_state or self._controller.state is not state:
                break
            past = state.costs.known_past(group)
            if past.costs:
                track = await asyncio.to_thread(learn, past, sync_s=state.rounds.expected_sync_s())
                state.costs.adopt(group, track, until=past.until, now_s=self._controller.clock())
                num_learned += 1
                await asyncio.sleep(PAUSE_S)
        return num_learned


def groups_of(state: FleetState, now_s: float) -> list[tuple[str, ...]]:
    """The servers of each group that decisions look at, or have looked at."""
    view = build_view(state, now_s, with_costs=False)
    groups = {tuple(sorted(bound_names(view)))} if state.settings.mode is not Mode.PER_ISLAND else set()
    if state.settings.mode is Mode.PER_ISLAND:
        binding = Binding(view.servers)
        for island in view.islands:
            servers = binding.of(island.node, island.server_id)
            groups.add(tuple(sorted(server.server_id for server in servers)))
    return sorted((groups | set(state.costs.groups)) - {()})


async def read_past(
    reader: Reader, names: Collection[str], *, since_s: float, until_s: float
) -> dict[str, ServerCosts]:
    """Costs of these servers as their samples between two Unix times told them.

    Raises:
        UnavailableError: the journal cannot be read.
    """
    first, last = await asyncio.to_thread(reader.sample_ids_since, since_s)
    past: dict[str, ServerCosts] = {}
    for begin in range(max(first - 1, last - MAX_ROWS, 0), last, SLICE_ROWS):
        end = min(begin + SLICE_ROWS, last)
        bodies = await asyncio.to_thread(reader.samples_of, names, after=begin, until=end)
        await asyncio.to_thread(_add, past, bodies, since_s, until_s)
        await asyncio.sleep(PAUSE_S)
    return past


def _add(past: dict[str, ServerCosts], bodies: Collection[str], since_s: float, until_s: float) -> None:
    for body in bodies:
        with contextlib.suppress(ValidationError):
            sample = LoadSample.model_validate_json(body)
            server = past.setdefault(sample.server_id, ServerCosts())
            if since_s <= sample.t_s <= until_s and sample.t_s > server.newest_s:
                server.add(sample)
