"""An island in a training loop of one's own: ``from diloco import Island``.

    with Island(model, optimizer, loader, synchronizer="http://127.0.0.1:9600", slot=0, sync_every=100) as island:
        for batch in loader:
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            island.step(tokens=batch["input_ids"].numel())

Between syncs nothing happens but counting. At a sync the local parameters (or their coded difference to the global
ones) go to the synchronizer, and the outer step's result comes back into the module (Douillard et al., 2023,
arXiv 2311.08105); with ``overlap_steps`` the round is open while inner steps go on, and its result is applied so many
steps later as new global + (local now - local at the push) (Douillard et al., 2025, arXiv 2501.18512). A sync that
fails costs nothing but its time: training goes on from the local parameters, and the next sync takes all progress.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.agent.rules import autonomous_command
from diloco.codec import codec_named
from diloco.directed import Directed
from diloco.inner import LOSS_SMOOTHING
from diloco.loop_syncs import LoopSyncs
from diloco.model import count_parameters
from diloco.options import Stateful, checked_data, checked_module, checked_options
from diloco.protocol import SyncCommand
from diloco.resume import (
    STATE_FORMAT,
    fragment_states,
    island_state,
    random_state,
    restore_random_state,
)
from diloco.schema import CodecName, FragmentState, Phase, Progress, SyncOutcome, SyncReport
from diloco.streaming import StreamingExchange, StreamingIsland
from diloco.transport import SynchronizerClient, check_cut, check_model
from service.client import client_options
from service.errors import ConflictError, InputError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""Of one request; a sync has more of them."""


class Island:
    """One DiLoCo worker around a module: counts inner steps, syncs when it is time, and can be continued.

    Attributes:
        slot: place in the run.
        num_steps: inner steps counted so far, of the whole run.
        num_tokens: tokens counted so far.
        last_sync: report of the last sync; None before the first.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        data: Stateful | None = None,
        *,
        synchronizer: str | None = None,
        controller: str | None = None,
        slot: int | None = None,
        sync_every: int | None = None,
        overlap_steps: int = 0,
        fragments: int | None = None,
        codec: CodecName = "fp32",
        timeout_s: float | None = None,
        name: str | None = None,
        token: str | None = None,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        """Join the run: the module offers the first global parameters, or is set to those that there are.

        Args:
            module: its parameters with requires_grad travel, as float32; all else stays on the island.
            optimizer: any; only `state_dict` looks at it. It goes on with its own state over a sync.
            data: anything that has ``state_dict`` and ``load_state_dict``; only `state_dict` looks at it.
            synchronizer: URL of the synchronizer; a controller says it otherwise.
            controller: URL of a controller that says when to sync (several with commas). Without one ``synchronizer``,
                ``slot`` and ``sync_every`` are needed.
            slot: place in the run, another one for each island; a controller gives a free one otherwise.
            sync_every: inner steps between two syncs. A sync moves one fragment, so that each of F syncs every F times
                as many steps: Streaming DiLoCo's H is sync_every · F, and DiLoCo's is sync_every.
            overlap_steps: inner steps that are taken while a round is open, below ``sync_every``; 0 waits for its end.
            fragments: parts of the module that sync in turn, F, the same on all islands; by default those of the run
                that there is, and 1 in a new one. With a controller its ``--num-fragments``.
            codec: how contributions travel: fp32, bf16, int8 or int4 (the last two with error feedback).
            timeout_s: longest time that joining, or one sync, may take; 60 by default.
            name: of this process for the controller, unique in the fleet; by default the host's name.
            token, tls_ca, tls_cert, tls_key: as the services have them.

        Raises:
            ConfigError: arguments that cannot work together, or a token that is not the synchronizer's.
            InputError: a module that cannot be synced, or data that cannot be continued.
            UnavailableError: no synchronizer, or no slot from a controller, in time.
            ManifestError: the run trains another model, or cuts it into other fragments.
        """
        self._options = options = checked_options(
            synchronizer=synchronizer,
            controller=controller,
            slot=slot,
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            fragments=fragments,
            codec=codec,
            timeout_s=timeout_s,
            name=name,
            token=token,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self._member = StreamingIsland(checked_module(module), codec_named(options.codec))
        self._optimizer = optimizer
        self._data = checked_data(data)
        self.num_steps = 0
        self.num_tokens = 0
        self.last_sync: SyncReport | None = None
        self._steps_since_attempt = 0
        self._loss: Tensor | None = None
        self._closed = False
        deadline_s = time.time() + options.timeout_s
        self._directed = self._register(deadline_s) if options.controller is not None else None
        try:
            self.slot, url = self._place()
            self._client = SynchronizerClient(
                httpx.Client(**client_options(options, url, timeout_s=min(REQUEST_TIMEOUT_S, options.timeout_s)))
            )
            exchange = StreamingExchange(self._member, self._client, slot=self.slot)
            self._syncs = LoopSyncs(self._member, exchange, overlap_steps=options.overlap_steps)
            self._join(deadline_s)
        except BaseException:
            self._leave()
            raise

    def step(self, tokens: int, *, loss: float | Tensor | None = None) -> SyncReport | None:
        """Count an inner step, which the optimizer has just taken, and sync if it is time.

        Args:
            tokens: what the step was taken on, in tokens or samples, at least 1: the weight of this island in a round.
            loss: shape (), for the controller's policies and its dashboard.

        Returns:
            The report of a sync that ended here; None at all other steps.

        Raises:
            InputError: ``tokens`` is below 1.
            ConflictError: the island is closed, or the controller has taken its slot back.
        """
        self._require_open()
        if tokens < 1:
            raise InputError(f"is {tokens}", field="tokens", remedy="give the tokens or samples of the step, 1 or more")
        self._member.count_step(tokens)
        self.num_steps += 1
        self.num_tokens += tokens
        self._steps_since_attempt += 1
        if loss is not None:
            value = torch.as_tensor(loss).detach().float()
            self._loss = value if self._loss is None else self._loss.lerp(value, LOSS_SMOOTHING)
        if self._directed is not None:
            self._directed.tell(self._progress)
        return self._noted(self._at_boundary())

    def sync(self) -> SyncReport:
        """Sync now, whatever the schedule says, and wait for the round's end: for the end of a run, say.

        It moves the fragment whose turn it is: `num_fragments` of them in a row move all.

        Raises:
            ConflictError: the island is closed.
        """
        self._require_open()
        if self._syncs.overlapped is not None:
            self._noted(self._syncs.finish())
        self._steps_since_attempt = 0
        command = self._own_command().model_copy(update={"overlap": False})
        report = self._noted(self._syncs.begin(command, num_steps=self.num_steps))
        assert report is not None, "a sync of no given round has an outcome"
        return report

    @property
    def num_fragments(self) -> int:
        """Parts of the module that sync in turn."""
        return self._member.num_fragments

    @property
    def version(self) -> int:
        """Outer steps in the global parameters that the module goes on from, on all fragments together."""
        return self._member.version

    @property
    def steps_since_sync(self) -> int:
        """Inner steps since the last sync of any fragment: with one, those that are not in the global parameters."""
        return self._member.steps_since_sync

    @property
    def residual_norm(self) -> float | None:
        """L2 norm of what the codec owes to the next contribution; None where it leaves nothing out."""
        return self._member.residual_norm

    def state_dict(self) -> dict[str, Any]:
        """All that a continuation needs, at a step boundary: module, optimizer and data position, torch's random
        numbers, counters, the global parameters, what the codec owes, and a sync that is under way.

        Tensors and plain values, as far as the data's own state is. The module's and the optimizer's tensors are not
        copies: save them before the next step.
        """
        overlapped = self._syncs.overlapped
        return {
            "format": STATE_FORMAT,
            "slot": self.slot,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "steps_since_attempt": self._steps_since_attempt,
            "fragments": [island_state(fragment) for fragment in self._member.fragments],
            "overlapped": None
            if overlapped is None
            else {"due_step": overlapped.due_step, "fragment": overlapped.fragment},
            "module": self._member.module.state_dict(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "data": None if self._data is None else self._data.state_dict(),
            "random": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on from what `state_dict` returned, in an island of the same slot, model, optimizer and data.

        Returns:
            True if all goes on as if nothing had been. False if the run has gone on meanwhile, without this island or
            with it (also where a later contribution of it waits in the open round): what it has moved of the module is
            then as it is globally now, and the steps since its last sync are dropped, for they may be in the run
            already. That goes for each fragment alone. Optimizer, data and counters are continued in both cases.

        Raises:
            InputError: it is no such state, or one of another slot, model or run.
            ManifestError: the synchronizer has come to hold a run of another model.
            UnavailableError: the synchronizer does not answer.
        """
        self._require_open()
        num_values = [fragment.global_flat.numel() for fragment in self._member.fragments]
        states = fragment_states(state, slot=self.slot, num_values=num_values)
        if self._syncs.overlapped is not None:
            self._noted(self._syncs.finish())
        run = self._ask_run()
        self._member.module.load_state_dict(state["module"])
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._data is not None and state["data"] is not None:
            self._data.load_state_dict(state["data"])
        restore_random_state(state["random"])
        self.num_steps, self.num_tokens = state["num_steps"], state["num_tokens"]
        deadline_s = time.time() + self._options.timeout_s
        exact = self._syncs.restore(states, run, slot=self.slot, deadline_s=deadline_s)
        self._steps_since_attempt = state["steps_since_attempt"] if any(exact) else 0
        overlapped = state["overlapped"]
        if overlapped is not None and exact[overlapped.get("fragment", 0)]:
            self._syncs.await_again(
                self._own_command(), fragment=overlapped.get("fragment", 0), due_step=overlapped["due_step"]
            )
        if not all(exact):
            logger.warning(
                "the run has gone on meanwhile, steps since the last sync are dropped slot=%d fragments=%s",
                self.slot,
                [index for index, is_exact in enumerate(exact) if not is_exact],
            )
        if self._directed is not None:
            self._directed.joined(self._progress(), num_fragments=self.num_fragments)
        return all(exact)

    def close(self) -> None:
        """Apply what an overlapped sync still brings, then leave the run. Steps since the last sync stay local."""
        if self._closed:
            return
        try:
            if self._syncs.overlapped is not None:
                self._noted(self._syncs.finish())
        finally:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()

    def _register(self, deadline_s: float) -> Directed:
        settings = self._options.agent_settings()
        return Directed(settings, num_parameters=count_parameters(self._member.module), deadline_s=deadline_s)

    def _place(self) -> tuple[int, str]:
        """Slot, and URL of the synchronizer."""
        if self._directed is not None:
            return self._directed.assignment.slot, self._directed.assignment.synchronizer_url
        assert self._options.slot is not None
        assert self._options.synchronizer is not None
        return self._options.slot, self._options.synchronizer

    def _join(self, deadline_s: float) -> None:
        wanted = self._options.fragments if self._directed is None else self._directed.num_fragments
        self._syncs.join(deadline_s=deadline_s, num_fragments=wanted)
        if self._directed is not None:
            self._directed.joined(self._progress(), num_fragments=self.num_fragments)

    def _due(self) -> SyncCommand | None:
        if self._directed is not None:
            return self._directed.take_due()
        assert self._options.sync_every is not None
        return self._own_command() if self._steps_since_attempt >= self._options.sync_every else None

    def _own_command(self) -> SyncCommand:
        epoch = 0 if self._directed is None else self._directed.epoch
        command = autonomous_command(epoch=epoch, now_s=time.time(), timeout_s=self._options.timeout_s)
        return command.model_copy(update={"overlap": self._options.overlap_steps > 0})

    def _at_boundary(self) -> SyncReport | None:
        if self._syncs.overlapped is not None:
            return self._syncs.finish_due(self.num_steps)
        command = self._due()
        if command is None:
            return None
        self._steps_since_attempt = 0
        return self._syncs.begin(command, num_steps=self.num_steps)

    def _noted(self, report: SyncReport | None) -> SyncReport | None:
        """Remember, log and tell how a sync ended."""
        if report is None:
            return None
        self.last_sync = report
        if report.outcome is SyncOutcome.FAILED:
            logger.warning("sync failed, training goes on from local parameters detail=%s", report.detail)
        else:
            logger.info(
                "sync round=%d outcome=%s inner_steps=%d tokens=%d version=%d",
                report.round,
                report.outcome,
                report.inner_steps,
                report.tokens,
                self.version,
            )
        if self._directed is not None:
            self._directed.report(report)
            self._directed.tell(self._progress)
        return report

    def _progress(self) -> Progress:
        last = self.last_sync
        return Progress(
            step=self.num_steps,
            inner_steps_since_sync=max(self._member.steps_since_sync, 0),
            tokens=self.num_tokens,
            tokens_since_sync=max(self._member.tokens_since_sync, 0),
            loss=None if self._loss is None else finite(float(self._loss)),
            update_norm=finite(self._member.update_norm()),
            residual_norm=self.residual_norm,
            round=self.version,
            phase=Phase.INNER,
            last_sync_at_s=None if last is None or last.outcome is SyncOutcome.FAILED else last.finished_s,
        )

    def _ask_run(self) -> tuple[FragmentState, ...]:
        """All fragments of it; none where the synchronizer has no run."""
        state = self._client.state(deadline_s=time.time() + self._options.timeout_s, slot=self.slot)
        if state.initialized:
            check_model(state, self._member.manifest)
            check_cut(state, self._member.manifests)
        return state.fragments

    def _require_open(self) -> None:
        if self._closed:
            raise ConflictError("is closed", field="island", remedy="make a new Island, and give it the state")

    def _leave(self) -> None:
        """Out of the run, without waiting for anything but a short farewell."""
        self._closed = True
        client: SynchronizerClient | None = getattr(self, "_client", None)
        if client is not None:
            client.close()
        if self._directed is not None:
            self._directed.close()


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
