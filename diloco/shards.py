"""The synchronizers of one run, as an island sees them: one, or several that share its fragments (`diloco.sharding`).

One that is away keeps only its own fragments from syncing. A sync therefore looks at all of them at once, and asks
each of them once. If the one that it needs is away it waits for it, for a part of its time: a restart is over in that.
After that it is known to be away until it answers again, and the next syncs go by it at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import torch
from torch import Tensor

from diloco.attempts import Backoff
from diloco.helpers import Helpers
from diloco.lull import Lulls
from diloco.partition import joined
from diloco.same_run import check_origin, check_place
from diloco.schema import FragmentState, InitReply, Manifest, OuterState
from diloco.sharding import SynchronizerShard
from diloco.tensorfile import OfferedShard
from diloco.transport import SynchronizerClient
from service.client import client_options
from service.errors import UnavailableError
from service.peers import split_urls
from service.settings import PeerSettings

logger = logging.getLogger(__name__)

PATIENCE_FRAC = 0.25
"""Of the time that a sync has, that it waits for a synchronizer that is away: what is left is enough for another's."""

AWAIT_S = 0.5
"""Between two looks at synchronizers on which somebody else has to begin the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the synchronizers said of themselves at one moment."""

    states: Mapping[int, OuterState]
    """By shard, of those that answered."""
    problems: Mapping[int, str]
    """Why the others did not."""

    @property
    def num_shards(self) -> int:
        return len(self.states) + len(self.problems)

    @property
    def all_begun(self) -> bool:
        return not self.problems and all(state.initialized for state in self.states.values())

    @property
    def fragments(self) -> dict[int, FragmentState]:
        """By number, as far as they are known."""
        return {one.fragment: one for state in self.states.values() for one in state.fragments}

    @property
    def origins(self) -> set[str]:
        """What the run began from, as those say where it has begun: one, where they agree."""
        told = (state.shard.origin for state in self.states.values() if state.shard is not None)
        return {origin for origin in told if origin is not None}

    @property
    def num_fragments(self) -> int | None:
        """Of the run; None where it has begun on none of those that answered."""
        for state in self.states.values():
            if state.initialized:
                return len(state.fragments) if state.shard is None else state.shard.num_fragments
        return None

    def of(self, fragment: int) -> OuterState | None:
        """The state of the synchronizer on which the fragment lives; None where it did not answer."""
        return self.states.get(fragment % self.num_shards)


def connect(
    settings: PeerSettings, urls: str, *, timeout_s: float, lulls: Lulls | None = None, helpers: Helpers | None = None
) -> Shards:
    """Clients of the synchronizers at these URLs, with commas between them; each wait ends after ``timeout_s``."""
    return Shards(
        [
            SynchronizerClient(
                httpx.Client(**client_options(settings, url, timeout_s=timeout_s)), lulls=lulls, helpers=helpers
            )
            for url in split_urls(urls)
        ]
    )


class Shards:
    """Clients of all synchronizers of a run, in the order of their shards."""

    def __init__(self, clients: Sequence[SynchronizerClient]) -> None:
        self._clients = tuple(clients)
        self._cancelled = threading.Event()
        self._away: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return len(self._clients)

    def of(self, fragment: int) -> SynchronizerClient:
        """A client of that fragment."""
        return self._clients[fragment % self.count].of(fragment)

    def url(self, index: int) -> str:
        return self._clients[index].url

    def cancel(self) -> None:
        """End every wait, from any thread."""
        self._cancelled.set()
        for client in self._clients:
            client.cancel()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def look_at_all(self, *, deadline_s: float, slot: int | None = None) -> Look:
        """The states of all, as a slot sees them.

        Raises:
            UnavailableError: one of them does not answer until the deadline.
            InputError: they are not the shards of one run, in their order.
        """
        states = {index: client.state(deadline_s=deadline_s, slot=slot) for index, client in enumerate(self._clients)}
        return self._checked(Look(states=states, problems={}))

    def look(self, *, deadline_s: float, needed: int) -> Look:
        """The states of those that answer; that of the ``needed`` fragment is waited for a while.

        Raises:
            UnavailableError: none does until the deadline.
            InputError: they are not the shards of one run, in their order.
        """
        if self.count == 1:
            return self.look_at_all(deadline_s=deadline_s)
        shard, backoff = needed % self.count, Backoff()
        began_s = time.time()
        patient_until_s = began_s + PATIENCE_FRAC * max(deadline_s - began_s, 0.0)
        look = self._glance(within_s=patient_until_s)
        patient_until_s = began_s if shard in self._away else patient_until_s
        while shard in look.problems and time.time() < (patient_until_s if look.states else deadline_s):
            if self._cancelled.wait(backoff.next_s()):
                raise UnavailableError("cancelled", field="synchronizer")
            look = self._glance(within_s=max(patient_until_s, time.time() + 1.0))
        self._note_away(look)
        if not look.states:
            raise UnavailableError("; ".join(look.problems.values()), field="synchronizer")
        return self._checked(look)

    def offer(
        self, index: int, manifests: Sequence[Manifest], flats: Sequence[Tensor], *, deadline_s: float, origin: str
    ) -> InitReply:
        """Offer a synchronizer that is known to have no run the parameters of its fragments.

        ``manifests`` and ``flats`` (1-d fp32) are those of all fragments of the run, in order.
        """
        part = None if self.count == 1 else OfferedShard(SynchronizerShard(index, self.count), origin)
        own = tuple(flats[index :: self.count])
        return self._clients[index].offer(
            joined(manifests),
            own[0] if len(own) == 1 else torch.cat(own),
            deadline_s=deadline_s,
            num_fragments=len(manifests),
            part=part,
        )

    def await_others(self, look: Look, *, deadline_s: float) -> None:
        """Give the island that is beginning the run, or can give a synchronizer back what it lost, a moment for that.

        Raises:
            UnavailableError: the deadline is over.
        """
        missing = [self.url(index) for index, state in look.states.items() if not state.initialized]
        if time.time() >= deadline_s or self._cancelled.wait(AWAIT_S):
            raise UnavailableError(
                f"{', '.join(missing)} has no part of the run that the other synchronizers have",
                field="synchronizer",
                remedy="wait for an island of the run, which restores it from what it holds; start an island with the"
                " initial parameters that the run began from; or begin a new run, with a new --directory on all",
            )

    def _glance(self, *, within_s: float) -> Look:
        """Ask all at once, and each once."""

        def ask(client: SynchronizerClient) -> OuterState | str:
            try:
                return client.state(deadline_s=within_s, once=True)
            except UnavailableError as exc:
                return exc.message

        with ThreadPoolExecutor(self.count, thread_name_prefix="look") as threads:
            answers = dict(enumerate(threads.map(ask, self._clients)))
        return Look(
            states={index: answer for index, answer in answers.items() if isinstance(answer, OuterState)},
            problems={index: answer for index, answer in answers.items() if isinstance(answer, str)},
        )

    def _checked(self, look: Look) -> Look:
        for index, state in look.states.items():
            check_place(state, url=self.url(index), index=index, count=self.count)
        for index, state in look.states.items():
            for origin in sorted(look.origins)[:1]:
                check_origin(state, origin, url=self.url(index))
        return look

    def _note_away(self, look: Look) -> None:
        for index in sorted(look.problems.keys() - self._away):
            error = look.problems[index]
            logger.warning("synchronizer is away, its fragments do not sync shard=%d error=%s", index, error)
        for index in sorted(self._away - look.problems.keys()):
            logger.info("synchronizer is back shard=%d url=%s", index, self.url(index))
        self._away = frozenset(look.problems)
