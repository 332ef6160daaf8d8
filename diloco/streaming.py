"""An island whose model is cut into fragments that sync in turn, as in Streaming DiLoCo (Douillard et al., 2025, arXiv
2501.18512): every fragment has global parameters, versions and progress of its own (`diloco.island`), and one sync
moves one of them. With one fragment it is the island of plain DiLoCo.

Which one a sync moves follows from the number of its round, or where nobody directs from the versions of all fragments
(`diloco.turns`). A sync begins with a look at all of them: what this island missed of the others it adopts first, so
that an island that was away is one sync behind at most, whatever the number of fragments.

Several synchronizers may share the fragments (`diloco.shards`). While one is away its fragments do not sync; a sync
that would have been theirs is that of the fragment which is furthest behind of the others, on all islands alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from diloco.applied import Pulled
from diloco.boundary import Boundary
from diloco.codec import CODECS, Codec
from diloco.errors import ManifestError
from diloco.exchange import Exchange
from diloco.fragment import manifest_of, wire_bytes
from diloco.island import Capture, Contribution, Island
from diloco.partition import cut, joined
from diloco.protocol import SyncCommand
from diloco.same_run import check_cut, check_model, check_origin
from diloco.schema import FragmentState, InitReply, Manifest, OuterState, SyncOutcome, SyncReport
from diloco.sharding import check_shards, origin_of
from diloco.shards import Look, Shards
from diloco.syncs import Pending, Syncs, Tally
from diloco.transport import SynchronizerClient
from diloco.turns import next_round, next_round_among, place_of

LOOK_S = 1.0
"""Least time for a look at what others may have begun meanwhile."""


class StreamingIsland:
    """A module as fragments."""

    def __init__(self, module: nn.Module, codec: Codec = CODECS["fp32"], *, num_fragments: int = 1) -> None:
        """As it stands the module is version 0 of all fragments.

        Raises:
            InputError: it has fewer tensors than fragments, or nothing in it can be trained.
        """
        self.module = module
        self.codec = codec
        self.cut(num_fragments)

    def cut(self, num_fragments: int) -> None:
        """Cut it, anew if it was: no progress is kept."""
        self.manifests: tuple[Manifest, ...] = cut(manifest_of(self.module), num_fragments)
        names = [frozenset(spec.name for spec in manifest.tensors) for manifest in self.manifests]
        self.fragments: tuple[Island, ...] = tuple(Island(self.module, self.codec, names=own) for own in names)

    @property
    def num_fragments(self) -> int:
        return len(self.fragments)

    @property
    def manifest(self) -> Manifest:
        """Of the whole model."""
        return joined(self.manifests)

    @property
    def global_flat(self) -> Tensor:  # (parameters,) fp32
        """The global parameters of all fragments, in wire order."""
        flats = [fragment.global_flat for fragment in self.fragments]
        return flats[0] if len(flats) == 1 else torch.cat(flats)

    @property
    def version(self) -> int:
        """The round of the run that is next: outer steps taken so far, on all fragments together."""
        return next_round(fragment.version for fragment in self.fragments)

    @property
    def steps_since_sync(self) -> int:
        """Inner steps since the last sync of any fragment."""
        return self._synced_last.steps_since_sync

    @property
    def tokens_since_sync(self) -> int:
        return self._synced_last.tokens_since_sync

    @property
    def _synced_last(self) -> Island:
        return min(self.fragments, key=lambda fragment: fragment.steps_since_sync)

    @property
    def residual_norm(self) -> float | None:
        """L2 norm of what the codec left out and owes; None where it leaves nothing out."""
        norms = [fragment.feedback.norm for fragment in self.fragments if fragment.feedback is not None]
        return math.hypot(*norms) if norms else None

    def count_step(self, tokens: int) -> None:
        """An inner step was taken on so many tokens."""
        for fragment in self.fragments:
            fragment.count_step(tokens)

    def update_norm(self) -> float:
        """L2 norm of the pseudo-gradients so far."""
        return math.hypot(*(fragment.update_norm() for fragment in self.fragments))

    def start_over(self) -> None:
        """Go back to the global parameters."""
        for fragment in self.fragments:
            fragment.rebase(fragment.global_flat, fragment.version)


def holds_nothing(_fragment: int, _its: FragmentState) -> bool:
    """Of an island that has just been made."""
    return False


class StreamingExchange(Syncs):
    """Runs the syncs of such an island against the synchronizers of its run. Rounds are those of the run."""

    def __init__(self, island: StreamingIsland, client: SynchronizerClient | Shards, *, slot: int) -> None:
        self._island = island
        self._shards = client if isinstance(client, Shards) else Shards((client,))
        self._slot = slot
        self._origin = ""
        """What the run began from, where several synchronizers have to agree on it."""
        self._before_push: Callable[[int, Contribution], None] = lambda *_: None
        self._exchanges = self._open()

    def join(
        self,
        *,
        deadline_s: float,
        num_fragments: int | None = None,
        holds: Callable[[int, FragmentState], bool] = holds_nothing,
    ) -> None:
        """Become part of the run with all fragments: offer the initial parameters, or start from the global ones.

        ``num_fragments`` is what somebody decided; None leaves it to the run that there is, and a new one has one.
        ``holds`` says of which fragments the island holds the global parameters already, and no progress.

        Raises:
            ManifestError: the run trains another model, or cuts it in another way, or its synchronizers disagree.
            InputError: there are fewer fragments than synchronizers, or these are not the run's.
            UnavailableError: not all synchronizers until the deadline.
        """
        while not (look := self._shards.look_at_all(deadline_s=max(deadline_s, time.time() + LOOK_S))).all_begun:
            self._cut(num_fragments or look.num_fragments or 1)
            check_shards(self._island.num_fragments, self._shards.count)
            if self._begin(look, deadline_s):
                return
        for state in look.states.values():
            check_model(state, self._island.manifest)
        self._cut(num_fragments or look.num_fragments or 1)
        for state in look.states.values():
            check_cut(state, self._island.manifests)
        self._origin = next(iter(look.origins), "")
        for number, fragment in sorted(look.fragments.items()):
            if not holds(number, fragment):
                self._exchanges[number].start_from(fragment.version, deadline_s=deadline_s)

    def _begin(self, look: Look, deadline_s: float) -> bool:
        """Begin the run with the island's own parameters, wherever it has not; whether all of it did begin with them.

        Where it has begun on some synchronizers only, then with these parameters: whoever began it may be gone.
        """
        own = self._own_origin()
        if look.origins - {own} or any(fragment.version for fragment in look.fragments.values()):
            self._shards.await_others(look, deadline_s=deadline_s)
            return False
        self._origin = own
        try:
            for index, state in look.states.items():
                if state.initialized:
                    continue
                reply = self._offer(index, deadline_s)
                if not reply.accepted:
                    return False
                for exchange in self._exchanges[index :: self._shards.count]:
                    exchange.begun(reply)
        except ManifestError:
            # Another island began the run meanwhile: what differs, the state says.
            if not any(state.initialized for state in self._shards.look_at_all(deadline_s=deadline_s).states.values()):
                raise
            return False
        return not look.origins

    def _own_origin(self) -> str:
        if self._shards.count == 1:
            return ""
        return origin_of(self._island.manifest, self._island.num_fragments, *map(wire_bytes, self._flats))

    def continue_as(self, num_fragments: int) -> None:
        """Be an island of a run with so many fragments, without joining it: an earlier process has."""
        self._cut(num_fragments)

    def meet_run(self, look: Look) -> None:
        """See that the run is what this island was a part of, wherever it is held.

        Raises:
            ManifestError: it trains another model, or cuts it in another way.
        """
        for state in look.states.values():
            if state.initialized:
                check_model(state, self._island.manifest)
                check_cut(state, self._island.manifests)
        self._origin = next(iter(look.origins), "")

    def start_from(self, fragment: int, version: int, *, deadline_s: float) -> None:
        """Drop the progress of one fragment, and go on from its global parameters, ``version`` or newer."""
        self._exchanges[fragment].start_from(version, deadline_s=deadline_s)

    def offered(self, fragment: int) -> Contribution | None:
        """What was pushed without an answer."""
        return self._exchanges[fragment].offered

    def offer_again(self, fragment: int, contribution: Contribution) -> None:
        """The next sync pushes it, which is a repetition if it has arrived already."""
        self._exchanges[fragment].offered = contribution

    def turn_of(self, command: SyncCommand) -> int:
        """The fragment that `capture` is of."""
        return self._turn_of(command)

    def before_push(self, call: Callable[[int, Contribution], None]) -> None:
        """Have this called with each contribution and its fragment, on the thread of the sync, before it travels."""
        self._before_push = call
        self._watch_pushes(self._exchanges)

    def _watch_pushes(self, exchanges: Iterable[Exchange]) -> None:
        for index, exchange in enumerate(exchanges):
            exchange.before_push = partial(self._before_push, index)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Of the fragments, in order."""
        return self._exchanges

    def meet_at(self, boundary: Boundary) -> None:
        super().meet_at(boundary)
        for exchange in self._exchanges:
            exchange.meet_at(boundary)

    def capture(self, command: SyncCommand) -> Capture:
        """Of the fragment whose turn it is, as far as this island knows."""
        return self._exchanges[self._turn_of(command)].capture()

    def begin(self, command: SyncCommand, captured: Capture | None = None) -> SyncReport | Pending | None:
        tally = Tally(started_s=time.time(), round=0, num_fragments=self._island.num_fragments)
        self._aim(tally, self._turn_of(command))
        return self._reported(command, tally, lambda: self._contribute(command, tally, captured))

    def _turn_of(self, command: SyncCommand) -> int:
        number = self._island.version if command.round is None else command.round
        return place_of(number, self._island.num_fragments).fragment

    def await_end(self, pending: Pending) -> Pulled:
        return self._exchanges[pending.tally.fragment].await_end(pending)

    def _take_end(self, pending: Pending, pulled: Pulled) -> SyncOutcome:
        return self._exchanges[pending.tally.fragment]._take_end(pending, pulled)

    def _start_over(self) -> None:
        self._island.start_over()

    def _contribute(self, command: SyncCommand, tally: Tally, captured: Capture | None) -> SyncOutcome | Pending | None:
        captured_of = tally.fragment
        while True:
            own = command if self._island.num_fragments == 1 else self._take_turn(command, tally)
            exchange = self._exchanges[tally.fragment]
            try:
                # Of another fragment, or of a turn that is over, it is no use.
                done = exchange.contribute(own, tally, captured if tally.fragment == captured_of else None)
            finally:
                self.outer_state, captured = exchange.outer_state, None
            if done is not None or command.round is not None:
                return done
            # Untold, and the round closed between our look and our coming: the turn is another fragment's.

    def _take_turn(self, command: SyncCommand, tally: Tally) -> SyncCommand:
        """Catch up on all fragments but the one whose turn it is; the command as that one counts."""
        look = self._look(command)
        turn = next_round_among({f: one.version for f, one in look.fragments.items()}, self._island.num_fragments)
        # A round that is ahead of a synchronizer that lost its state means whatever is next there.
        number = turn if command.round is None else min(command.round, turn)
        place = place_of(number, self._island.num_fragments)
        if look.of(place.fragment) is None:
            place = place_of(turn, self._island.num_fragments)
        tally.note = "; ".join(look.problems.values())
        for index, exchange in enumerate(self._exchanges):
            state = look.of(index)
            if index != place.fragment and state is not None:
                exchange.follow(state, command, tally)
        self._aim(tally, place.fragment)
        return command.model_copy(update={"round": place.version})

    def _look(self, command: SyncCommand) -> Look:
        """At the synchronizers, after what became of contributions without an answer is known."""
        if any(exchange.awaits_answer for exchange in self._exchanges):
            reached = self._reach(command)
            for index, exchange in enumerate(self._exchanges):
                if reached.of(index) is not None:
                    exchange.settle(command)
        return self._reach(command)

    def _reach(self, command: SyncCommand) -> Look:
        """A look at those that answer. Where one lost its disk, what the islands share is the best there is."""
        needed = self._turn_of(command)
        look = self._shards.look(deadline_s=command.deadline_s, needed=needed)
        lost = [index for index, state in look.states.items() if not state.initialized]
        for index in lost:
            self._offer(index, command.deadline_s)
        if lost:
            look = self._shards.look(deadline_s=command.deadline_s, needed=needed)
        if look.all_begun and look.origins:
            # One run on all of them: also where it is not the one that this island began with.
            self._origin = next(iter(look.origins))
        for index, state in look.states.items():
            self._check(index, state)
        return look

    def _aim(self, tally: Tally, fragment: int) -> None:
        tally.fragment = fragment
        tally.round = self._exchanges[fragment].version

    def _check(self, index: int, state: OuterState) -> None:
        """See that this synchronizer still holds the run."""
        check_cut(state, self._island.manifests)
        check_origin(state, self._origin, url=self._shards.url(index))

    @property
    def _flats(self) -> list[Tensor]:
        return [fragment.global_flat for fragment in self._island.fragments]

    def _offer(self, index: int, deadline_s: float) -> InitReply:
        """Offer a synchronizer what lives there of the global parameters."""
        return self._shards.offer(
            index, self._island.manifests, self._flats, deadline_s=deadline_s, origin=self._origin
        )

    def _cut(self, num_fragments: int) -> None:
        if num_fragments != self._island.num_fragments:
            self._island.cut(num_fragments)
            self._exchanges = self._open()

    def _open(self) -> tuple[Exchange, ...]:
        exchanges = tuple(
            Exchange(
                fragment,
                self._shards.of(index),
                slot=self._slot,
                fragment=index,
                begin_run=partial(self._offer, index % self._shards.count),
                check=partial(self._check, index % self._shards.count),
                whole=lambda: self._island.manifest,
            )
            for index, fragment in enumerate(self._island.fragments)
        )
        self._watch_pushes(exchanges)
        return exchanges
