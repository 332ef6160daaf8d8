"""The outer state of a fragment: takes contributions, closes rounds, publishes generations.

The event loop owns this state; whatever touches a whole model (verification, outer step, files) runs in a thread. One
lock per slot lets a slot's chunks come one at a time. The commit lock makes a contribution enter either the round that
closes now or none: while an outer step runs, the last chunk of a contribution waits, and then learns the new version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Hashable
from pathlib import Path

from torch import Tensor

from diloco.codec import CODECS, Codec
from diloco.errors import NotInitializedError
from diloco.outer import OuterOptimizer
from diloco.schema import ChunkReply, FragmentState, Manifest
from diloco.synchronizer.config import SynchronizerSettings
from diloco.synchronizer.contribution import (
    accept_contribution,
    begin_contribution,
    recover_contributions,
    retire_contribution,
    upload_name,
    verify_contribution,
)
from diloco.synchronizer.generation import (
    NUM_KEPT,
    Generation,
    newest_generation,
    older_generations,
    prune_generations,
)
from diloco.synchronizer.grace import Arrivals, remember
from diloco.synchronizer.intake import Intake
from diloco.synchronizer.metrics import Metrics, Verdict
from diloco.synchronizer.open_round import OpenRound, Place
from diloco.synchronizer.outer_state import open_outer, warn_of_changes
from diloco.synchronizer.published import Published
from diloco.synchronizer.rounds import Claim, Close, Refusal
from diloco.synchronizer.step import NonFiniteStepError, Share, Step, StepPlan, take_step
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import Chunk, Upload
from service.errors import InputError, UnavailableError
from service.tasks import wait_for_exit

logger = logging.getLogger(__name__)

STEP_RETRY_S = 2.0
"""Pause after an outer step that failed, as on a full disk: soon enough for islands that wait at the other end."""


class OuterRun:
    """The global parameters of one fragment and their open round."""

    def __init__(
        self,
        settings: SynchronizerSettings,
        metrics: Metrics,
        *,
        fragment: int,
        disk: Disk,
        intake: Intake,
        published: Published | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``published`` is one for which somebody waits already."""
        self.fragment = fragment
        self._rules = settings.round_rules
        self._pull_codec = CODECS[settings.pull_codec]
        self._num_kept = max(NUM_KEPT, settings.max_staleness + 1)
        self.published = published or Published(num_kept=self._num_kept)
        self._settings = settings
        self._directory = disk.directory
        self._disk = disk
        self._step_problem: str | None = None
        self._metrics = metrics
        self._clock = clock
        self._outer: OuterOptimizer | None = None
        self._round: OpenRound | None = None
        self._intake = intake
        self._commit_lock = asyncio.Lock()
        self._slot_locks: dict[int, asyncio.Lock] = {}
        self._last_opened_s: float | None = None
        """When the last round that closed had opened; None before, and for one from before a restart."""

    @property
    def problem(self) -> str | None:
        """Why the last outer step, or the last write, failed; None when it did not."""
        return self._step_problem or self._disk.problem

    @property
    def manifest(self) -> Manifest | None:
        """Of the fragment; None before the run has begun."""
        return self._round.generation.manifest if self._round else None

    @property
    def version(self) -> int:
        return self._round.generation.version if self._round else 0

    @property
    def run(self) -> str | None:
        """Identity of the run; None before it has begun."""
        return self._round.generation.run if self._round else None

    @property
    def num_contributions(self) -> int:
        """Complete ones to the open round."""
        return len(self._round.accepted) if self._round else 0

    @property
    def grace_s(self) -> float:
        """How long its rounds stay open for stragglers now."""
        return self._round.grace_s if self._round else 0.0

    def load(self) -> bool:
        """Go on from the directory: the newest intact generation, and the contributions to the round on top of it.

        False when there is nothing to go on from.
        """
        found = newest_generation(self._directory)
        if found is None:
            return False
        generation, parameters, momentum = found
        warn_of_changes(generation.outcome, self._settings)
        for older in older_generations(self._directory, generation, num_kept=self._num_kept):
            self.published.add(older)
        open_round = self.start(generation, parameters, momentum)
        for accepted in recover_contributions(
            self._directory,
            round_number=generation.version,
            num_values=generation.num_values,
            bases=self.published.versions,
            run=generation.run,
        ):
            age_s = max(time.time() - accepted.path.stat().st_mtime, 0.0)
            open_round.admit(accepted, now_s=self._clock() - age_s, unix_s=time.time() - age_s)
        logger.info(
            "resumed directory=%s version=%d open_round_slots=%s",
            self._directory,
            generation.version,
            sorted(open_round.accepted),
        )
        return True

    def start(self, generation: Generation, parameters: Tensor, momentum: Tensor) -> OpenRound:
        """Open the round on top of the generation."""
        self._outer = open_outer(self._settings, generation, parameters, momentum)
        return self._publish(generation, generation.outcome.arrivals)

    async def contribute(self, claim: Claim, chunk: Chunk) -> ChunkReply:
        """Take a chunk of a contribution; with the last one it is verified, written, and in the round.

        Raises:
            RoundClosedError, FencedError: it is not for the open round, or not from the owner of the slot.
        """
        async with self._slot_locks.setdefault(claim.slot, asyncio.Lock()):
            place = self._require_round().find(claim, chunk.digest)
            if place is not None:
                return self._completed(chunk, Verdict.REPEATED, place)
            open_round = self._admit(claim)
            codec = CODECS[claim.codec]
            _check_size(chunk, codec, open_round.generation)
            base = self.published.get(claim.round).parameters()
            try:
                received = await self._intake.receive(
                    upload_name(claim),
                    claim,
                    chunk,
                    begin=lambda: begin_contribution(self._directory, claim, chunk),
                    verify=lambda upload: verify_contribution(upload, base, codec),
                )
            except InputError:
                # If the round has closed meanwhile then that is what the island has to know.
                self._admit(claim)
                self._metrics.contributions.labels(Verdict.INVALID).inc()
                raise
            if received is None or received[1] is None:
                received_bytes = received[0].received if received else 0
                version = open_round.generation.version
                return ChunkReply(received_bytes=received_bytes, complete=False, version=version)
            return await self._accept(claim, chunk, received[0])

    def state(self, *, slot: int | None = None) -> FragmentState | None:
        """As a slot sees it; None before the run has begun."""
        if self._round is None:
            return None
        generation = self._round.generation
        return FragmentState(
            fragment=self.fragment,
            num_tensors=len(generation.manifest.tensors),
            version=generation.version,
            num_bytes=generation.num_bytes,
            digest=generation.digest.hex(),
            open_round=self._round.state(),
            run=generation.run,
            applied=None if slot is None else generation.outcome.last.get(slot),
        )

    def note_arrival(self, slot: int, round_number: int) -> None:
        """Learn from an island that comes to the round that closed last how late it is, whatever it then does."""
        history = () if self._round is None else self._round.history
        last = history[-1] if history else None
        if last is not None and last.round == round_number and self._last_opened_s is not None:
            late = last.with_late(slot, self._clock() - self._last_opened_s)
            self._require_round().history = remember(history, late)

    async def close_rounds(self, exit_event: asyncio.Event) -> None:
        """Close rounds as they become due, until the exit."""
        while not exit_event.is_set():
            if self._round is None or self._round.close_reason(self._clock()) is None:
                due_s = self._round.due_s if self._round else None
                await self.published.wait_change(None if due_s is None else due_s - self._clock())
            elif not await self._close_round(self._round):
                await wait_for_exit(exit_event, STEP_RETRY_S)

    async def _accept(self, claim: Claim, chunk: Chunk, upload: Upload) -> ChunkReply:
        async with self._commit_lock:
            # The round may have closed while the contribution was verified.
            open_round = self._admit(claim)
            with self._disk.writing():
                into = open_round.generation.version
                accepted = await asyncio.to_thread(accept_contribution, self._directory, claim, upload, into=into)
            self._intake.settle(upload_name(claim))
            replaces = open_round.admit(accepted, now_s=self._clock(), unix_s=time.time())
            self.note_arrival(claim.slot, claim.round)
        self._metrics.staleness.observe(accepted.staleness)
        logger.debug(
            "contribution accepted fragment=%d round=%d into=%d slot=%d tokens=%d codec=%s staleness_weight=%.3f",
            self.fragment,
            claim.round,
            into,
            claim.slot,
            claim.tokens,
            claim.codec,
            open_round.weight(accepted.staleness),
        )
        self.published.notify()
        verdict = Verdict.STALE if accepted.staleness else Verdict.ACCEPTED
        place = Place(round=into, staleness=accepted.staleness)
        return self._completed(chunk, Verdict.REPLACED if replaces else verdict, place)

    def _admit(self, claim: Claim) -> OpenRound:
        """The open round, which the claim may enter."""
        open_round = self._require_round()
        reason = open_round.refusal(claim)
        if reason is not None:
            self._metrics.contributions.labels(reason).inc()
            if reason is Refusal.LATE:
                self.note_arrival(claim.slot, claim.round)
            raise open_round.error(claim, reason)
        return open_round

    def _completed(self, chunk: Chunk, verdict: Verdict, place: Place) -> ChunkReply:
        self._metrics.contributions.labels(verdict).inc()
        open_round = self._require_round()
        return ChunkReply(
            received_bytes=chunk.total,
            complete=True,
            version=open_round.generation.version,
            round=place.round,
            staleness=place.staleness,
            staleness_weight=open_round.weight(place.staleness),
            digest=chunk.digest.hex(),
        )

    async def _close_round(self, open_round: OpenRound) -> bool:
        """Take the outer step and publish it; False when it has to be tried again."""
        outer = self._require_outer()
        async with self._commit_lock:
            began_s = self._clock()
            reason = open_round.close_reason(began_s)
            if reason is None:
                return True
            accepted = dict(open_round.accepted)
            base = open_round.generation
            plan = StepPlan(
                base=base,
                shares={
                    slot: Share(
                        accepted=entry,
                        base=self.published.get(entry.claim.round),
                        weight=open_round.weight(entry.staleness),
                    )
                    for slot, entry in accepted.items()
                },
                epochs=dict(open_round.epochs),
                arrivals=remember(open_round.history, open_round.arrivals()),
            )
            try:
                step = await asyncio.to_thread(take_step, self._disk, outer, plan, pull_codec=self._pull_codec)
            except NonFiniteStepError as exc:
                self._metrics.rounds_discarded.inc()
                logger.warning("round discarded round=%d slots=%s reason=%s", base.version, sorted(accepted), exc)
                open_round.clear()
            except UnavailableError as exc:
                logger.warning("outer step failed, the round stays open reason=%s", exc)
                return self._failed(exc)
            except Exception as exc:
                logger.exception("outer step failed, the round stays open")
                return self._failed(exc)
            else:
                outer.commit()
                self._last_opened_s = open_round.opened_s
                # Again: more islands may have told meanwhile how late they are.
                self._publish(step.generation, remember(open_round.history, open_round.arrivals()))
                self._report(step, reason, sorted(accepted.keys() - set(step.dropped)), self._clock() - began_s)
            await asyncio.to_thread(self._tidy, [a.path for a in accepted.values()])
        return True

    def _report(self, step: Step, reason: Close, slots: list[int], seconds: float) -> None:
        self._step_problem = None
        self._metrics.contributions.labels(Verdict.DROPPED).inc(len(step.dropped))
        if step.dropped:
            logger.warning("outer step overflowed, contributions left out slots=%s", step.dropped)
        self._metrics.rounds.labels(reason).inc()
        self._metrics.step_seconds.observe(seconds)
        self._metrics.pseudo_gradient_norm.labels(self.fragment).set(step.pseudo_gradient_norm)
        self._metrics.pull_residual_norm.labels(self.fragment).set(step.residual_norm)
        logger.info(
            "outer step fragment=%d version=%d closed_by=%s slots=%s stale=%s tokens=%d pseudo_gradient_norm=%.6g "
            "seconds=%.3f",
            self.fragment,
            step.generation.version,
            reason,
            slots,
            sorted(step.stale),
            step.tokens,
            step.pseudo_gradient_norm,
            seconds,
        )

    def _failed(self, exc: Exception) -> bool:
        self._metrics.step_failures.inc()
        self._step_problem = f"outer step failed: {exc}"
        return False

    def _publish(self, generation: Generation, history: tuple[Arrivals, ...]) -> OpenRound:
        """Make the generation the one that islands pull, and open the round on top of it."""
        epochs = self._round.epochs if self._round else {}
        self.published.add(generation)
        self._round = OpenRound(self.published, self._rules, epochs=epochs, history=history)
        # What is still being uploaded was meant for the round before: it goes on only if it may be stale.
        self._intake.discard_unless(self._may_enter)
        self._metrics.version.labels(self.fragment).set(generation.version)
        self.published.notify()
        return self._round

    def _may_enter(self, key: Hashable) -> bool:
        return isinstance(key, Claim) and self._require_round().refusal(key) is None

    def _tidy(self, contributions: list[Path]) -> None:
        """Remove files that no longer count; what cannot be removed is removed at the next start."""
        with contextlib.suppress(OSError):
            for path in contributions:
                retire_contribution(path)
            prune_generations(self._directory, num_kept=self._num_kept)

    def _require_outer(self) -> OuterOptimizer:
        assert self._outer is not None, "there is a round only on top of parameters"
        return self._outer

    def _require_round(self) -> OpenRound:
        if self._round is None:
            raise NotInitializedError(
                "there are no global parameters to contribute to", field="fragment", remedy="offer initial ones first"
            )
        return self._round


def _check_size(chunk: Chunk, codec: Codec, generation: Generation) -> None:
    """Refuse a contribution at its first chunk if its end could only be refused."""
    expected = codec.num_bytes(generation.num_values)
    if chunk.total != expected:
        as_codec = "" if codec.carries_parameters else f" as {codec.name}"
        raise InputError(
            f"contribution has {chunk.total} bytes, the parameters have {expected}{as_codec}",
            field="Content-Range",
            remedy="run every island with the same model",
        )
