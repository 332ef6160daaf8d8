"""What speaks with synchronizer and controller for a training loop of one's own: in the only process of an island, or
in the first of its ranks. `diloco.library` is what the loop sees.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diloco.agent.rules import autonomous_command
from diloco.codec import codec_named
from diloco.directed import Directed
from diloco.inner import LOSS_SMOOTHING
from diloco.loop_progress import log_end, loop_progress
from diloco.loop_ranks import Order, Told
from diloco.loop_syncs import LoopSyncs, Overlapped
from diloco.model import count_parameters
from diloco.options import IslandOptions
from diloco.protocol import SyncCommand
from diloco.resume import island_state
from diloco.same_run import check_cut, check_model
from diloco.schema import FragmentState, Progress, SyncReport
from diloco.shards import Shards, connect
from diloco.streaming import StreamingExchange, StreamingIsland
from service.errors import ConflictError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""Of one request; a sync has more of them."""


@dataclass(slots=True)
class Counts:
    """How far a loop is, all ranks together."""

    num_steps: int = 0
    num_tokens: int = 0
    since_attempt: int = 0
    """Inner steps since the last sync was begun, whatever became of it."""
    loss: Tensor | None = None

    def smooth_loss(self, loss: float | Tensor) -> None:
        value = torch.as_tensor(loss).detach().float()
        self.loss = value if self.loss is None else self.loss.lerp(value, LOSS_SMOOTHING)


class Lead:
    """The member of the run."""

    def __init__(self, module: nn.Module, options: IslandOptions, counts: Counts) -> None:
        """Join the run, until ``timeout_s`` from now. For errors see `diloco.library.Island`."""
        self._options = options
        self._counts = counts
        self.member = StreamingIsland(module, codec_named(options.codec))
        self.last_sync: SyncReport | None = None
        self._shards: Shards | None = None
        self._command: SyncCommand | None = None
        """The sync that comes at this step boundary."""
        deadline_s = time.time() + options.timeout_s
        self._directed = self._register(deadline_s) if options.controller is not None else None
        try:
            self.slot, urls = self._place()
            self._shards = connect(options, urls, timeout_s=min(REQUEST_TIMEOUT_S, options.timeout_s))
            exchange = StreamingExchange(self.member, self._shards, slot=self.slot)
            self.syncs = LoopSyncs(self.member, exchange, overlap_steps=options.overlap_steps)
            self._join(deadline_s)
        except BaseException:
            self.leave()
            raise

    def order(self, hold: Callable[[], None]) -> Order:
        """What comes at this step boundary; ``hold`` is called now and then while the run is paused.

        Raises:
            ConflictError: the controller has taken the slot back.
        """
        if self.syncs.overlapped is not None:
            self._heed(self.syncs.overlapped, hold)
            return Order.FINISH if self.syncs.overlapped.is_due(self._counts.num_steps) else Order.NONE
        self._command = self._due(hold)
        return Order.NONE if self._command is None else Order.SYNC

    def count(self, tokens: int) -> None:
        """A step was taken on so many tokens."""
        self.member.count_step(tokens)
        if self._directed is not None:
            self._directed.tell(self._progress)

    def obey(self, order: Order) -> SyncReport | None:
        """Begin or end the sync that was ordered; the report of one that ended."""
        if order is Order.FINISH:
            return self._noted(self.syncs.finish())
        assert self._command is not None, "a sync was due"
        self._counts.since_attempt = 0
        command, self._command = self._command, None
        report = self.syncs.begin(command, num_steps=self._counts.num_steps)
        if report is None and self.syncs.overlapped is None and self._directed is not None:
            self._directed.skipped(serial=command.serial)
        return self._noted(report)

    def wait_out_pause(self) -> None:
        """Return when the run is not paused.

        Raises:
            ConflictError: the controller has taken the slot back.
        """
        if self._directed is not None:
            self._directed.wait_out_pause()

    def _heed(self, sync: Overlapped, hold: Callable[[], None]) -> None:
        """What the controller says counts also while a sync is under way; one for a slot that is lost is left."""
        if self._directed is None:
            return
        try:
            self._directed.heed(sync.end, lambda: sync.is_due(self._counts.num_steps), hold)
        except ConflictError:
            assert self._shards is not None, "it has joined"
            self._shards.cancel()
            self.syncs.abandon()
            raise

    def sync(self) -> SyncReport:
        """Sync now, and wait for the round's end."""
        self.finish()
        self._counts.since_attempt = 0
        command = self._own_command().model_copy(update={"overlap": False})
        report = self._noted(self.syncs.begin(command, num_steps=self._counts.num_steps))
        assert report is not None, "a sync of no given round has an outcome"
        return report

    def finish(self) -> SyncReport | None:
        """Apply what a sync under way still brings."""
        return self._noted(self.syncs.finish()) if self.syncs.overlapped is not None else None

    def told(self, report: SyncReport | None = None, *, exact: bool = True) -> Told:
        """What the other ranks have to know."""
        return Told(
            slot=self.slot,
            num_fragments=self.member.num_fragments,
            version=self.member.version,
            steps_since_sync=self.member.steps_since_sync,
            residual_norm=self.member.residual_norm,
            report=report,
            exact=exact,
        )

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from."""
        overlapped = self.syncs.overlapped
        under_way = None if overlapped is None else {"due_step": overlapped.due_step, "fragment": overlapped.fragment}
        return {
            "fragments": [island_state(fragment) for fragment in self.member.fragments],
            "overlapped": under_way,
        }

    def restore(self, states: list[dict[str, Any]], state: dict[str, Any]) -> bool:
        """Go on from the states of all fragments, in the module as it was then; says whether all could.

        Raises:
            ManifestError: the synchronizer has come to hold a run of another model.
            UnavailableError: it does not answer.
        """
        deadline_s = time.time() + self._options.timeout_s
        exact = self.syncs.restore(states, self._ask_run(deadline_s), slot=self.slot, deadline_s=deadline_s)
        self._counts.since_attempt = state["steps_since_attempt"] if any(exact) else 0
        overlapped = state["overlapped"]
        if overlapped is not None and exact[overlapped.get("fragment", 0)]:
            self.syncs.await_again(
                self._own_command(), fragment=overlapped.get("fragment", 0), due_step=overlapped["due_step"]
            )
        if not all(exact):
            logger.warning(
                "the run has gone on meanwhile, steps since the last sync are dropped slot=%d fragments=%s",
                self.slot,
                [index for index, is_exact in enumerate(exact) if not is_exact],
            )
        self._tell_joined()
        return all(exact)

    def leave(self) -> None:
        """Out of the run, without waiting for anything but a short farewell."""
        if self._shards is not None:
            self._shards.close()
        if self._directed is not None:
            self._directed.close()

    def _register(self, deadline_s: float) -> Directed:
        settings = self._options.agent_settings()
        return Directed(settings, num_parameters=count_parameters(self.member.module), deadline_s=deadline_s)

    def _place(self) -> tuple[int, str]:
        """Slot, and URL of the synchronizer, or of several with commas."""
        if self._directed is not None:
            return self._directed.assignment.slot, self._directed.assignment.synchronizer_url
        assert self._options.slot is not None
        assert self._options.synchronizer is not None
        return self._options.slot, self._options.synchronizer

    def _join(self, deadline_s: float) -> None:
        wanted = self._options.fragments if self._directed is None else self._directed.num_fragments
        self.syncs.join(deadline_s=deadline_s, num_fragments=wanted)
        self._tell_joined()

    def _tell_joined(self) -> None:
        if self._directed is not None:
            self._directed.joined(self._progress(), num_fragments=self.member.num_fragments)

    def _due(self, hold: Callable[[], None]) -> SyncCommand | None:
        if self._directed is not None:
            return self._directed.take_due(hold)
        assert self._options.sync_every is not None
        return self._own_command() if self._counts.since_attempt >= self._options.sync_every else None

    def _own_command(self) -> SyncCommand:
        epoch = 0 if self._directed is None else self._directed.epoch
        command = autonomous_command(epoch=epoch, now_s=time.time(), timeout_s=self._options.timeout_s)
        return command.model_copy(update={"overlap": self._options.overlap_steps > 0})

    def _noted(self, report: SyncReport | None) -> SyncReport | None:
        """Remember, log and tell how a sync ended."""
        if report is None:
            return None
        self.last_sync = report
        log_end(report, version=self.member.version)
        if self._directed is not None:
            self._directed.report(report, serial=self.syncs.serial)
            self._directed.tell(self._progress)
        return report

    def _progress(self) -> Progress:
        counts = self._counts
        return loop_progress(
            self.member, num_steps=counts.num_steps, num_tokens=counts.num_tokens, loss=counts.loss, last=self.last_sync
        )

    def _ask_run(self, deadline_s: float) -> list[FragmentState | None]:
        """All fragments of it; None where the synchronizer of one has no run."""
        assert self._shards is not None, "it has joined"
        look = self._shards.look_at_all(deadline_s=deadline_s, slot=self.slot)
        for state in look.states.values():
            if state.initialized:
                check_model(state, self.member.manifest)
                check_cut(state, self.member.manifests)
        return [look.fragments.get(number) for number in range(self.member.num_fragments)]
