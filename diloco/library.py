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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.group import PeerLostError
from diloco.lead import Counts, Lead
from diloco.loop_ranks import Order, RankCircle, Ranks, Told, unwrapped
from diloco.options import Stateful, checked_data, checked_module, checked_options
from diloco.protocol import PULL_GRACE_S
from diloco.resume import STATE_FORMAT, fragment_states, random_state, require_state_of, restore_random_state
from diloco.schema import CodecName, SyncReport
from diloco.team import RanksDifferError
from service.errors import ConflictError, InputError, WadilocoError

T = TypeVar("T")


class Island:
    """One DiLoCo worker around a module: counts inner steps, syncs when it is time, and can be continued.

    Attributes:
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
        process_group: Ranks | None = None,
        rank_timeout_s: float | None = None,
        name: str | None = None,
        token: str | None = None,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        """Join the run: the module offers the first global parameters, or is set to those that there are.

        Args:
            module: its parameters with requires_grad travel, as float32; all else stays on the island.
                DistributedDataParallel is looked through.
            optimizer: any; only `state_dict` looks at it. It goes on with its own state over a sync.
            data: anything that has ``state_dict`` and ``load_state_dict``; only `state_dict` looks at it.
            synchronizer: URL of the synchronizer, or of all that share the run's fragments, in the order of their
                ``--shard`` and with commas; a controller says it otherwise.
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
            process_group: the ranks that train this module together as one island: a group of torch.distributed, or
                "world" for its default group. Rank 0 of it speaks for all; all ranks call the same methods at the same
                steps. None: this process is an island by itself.
            rank_timeout_s: longest wait of one rank for another, beyond what a sync may take; 300 by default.
            name: of this process for the controller, unique in the fleet; by default the host's name.
            token, tls_ca, tls_cert, tls_key: as the services have them.

        Raises:
            ConfigError: arguments that cannot work together, or a token that is not the synchronizer's.
            InputError: a module that cannot be synced, or data that cannot be continued.
            UnavailableError: no synchronizer, or no slot from a controller, in time.
            PeerLostError: not all ranks came in time.
            ManifestError: the run trains another model, or cuts it into other fragments.
        """
        options = checked_options(
            synchronizer=synchronizer,
            controller=controller,
            slot=slot,
            sync_every=sync_every,
            overlap_steps=overlap_steps,
            fragments=fragments,
            codec=codec,
            timeout_s=timeout_s,
            rank_timeout_s=rank_timeout_s,
            name=name,
            token=token,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self._module = checked_module(unwrapped(module, has_ranks=process_group is not None))
        self._optimizer = optimizer
        self._data = checked_data(data)
        self._counts = Counts()
        self._lead: Lead | None = None
        self._closed = False
        self.last_sync: SyncReport | None = None
        self._circle: RankCircle | None = None
        if process_group is not None:
            timeout = options.rank_timeout_s + options.timeout_s + PULL_GRACE_S
            self._circle = RankCircle(process_group, self._module, timeout_s=timeout)

        def join() -> Lead:
            self._lead = Lead(self._module, options, self._counts)
            return self._lead

        try:
            self._told = self._together(join, lambda lead: lead.told(), anew=True)
        except BaseException:
            self._leave()
            raise

    def step(self, tokens: int, *, loss: float | Tensor | None = None) -> SyncReport | None:
        """Count an inner step, which the optimizer has just taken, and sync if it is time.

        Args:
            tokens: what the step was taken on, in tokens or samples, at least 1: the weight of this island in a round.
                Those of this rank; the island's are the sum over its ranks.
            loss: shape (), for the controller's policies and its dashboard. That of rank 0 counts.

        Returns:
            The report of a sync that ended here; None at all other steps. The same on all ranks.

        Raises:
            InputError: ``tokens`` is below 1.
            ConflictError: the island is closed, or the controller has taken its slot back.
            PeerLostError: another rank is gone; the island is closed then.
            RanksDifferError: the ranks have other parameters, or are at other steps; likewise.
        """
        self._require_open()
        if tokens < 1:
            raise InputError(f"is {tokens}", field="tokens", remedy="give the tokens or samples of the step, 1 or more")
        self._counts.num_steps += 1
        self._counts.since_attempt += 1
        if loss is not None:
            self._counts.smooth_loss(loss)
        with self._closed_after_errors():
            total, order = self._meet(tokens)
        self._counts.num_tokens += total
        if self._lead is not None:
            self._lead.count(total)
        else:
            self._told = self._told.model_copy(update={"steps_since_sync": self._told.steps_since_sync + 1})
        report = None if order is Order.NONE else self._synced(lambda lead: lead.obey(order))
        if order is Order.FINISH and self._lead is not None and self._circle is None:
            # With other ranks the pause begins after one more step: they wait for this one at step boundaries alone.
            self._lead.wait_out_pause()
        return report

    def sync(self) -> SyncReport:
        """Sync now, whatever the schedule says, and wait for the round's end: for the end of a run, say.

        It moves the fragment whose turn it is: `num_fragments` of them in a row move all. All ranks call it.

        Raises:
            ConflictError: the island is closed.
            PeerLostError, RanksDifferError: as `step`.
        """
        self._require_open()
        report = self._synced(Lead.sync)
        assert report is not None, "it was waited for"
        return report

    @property
    def slot(self) -> int:
        """Place in the run."""
        return self._told.slot

    @property
    def num_steps(self) -> int:
        """Inner steps counted so far, of the whole run."""
        return self._counts.num_steps

    @property
    def num_tokens(self) -> int:
        """Tokens counted so far, of all ranks."""
        return self._counts.num_tokens

    @property
    def num_fragments(self) -> int:
        """Parts of the module that sync in turn."""
        return self._now.num_fragments

    @property
    def version(self) -> int:
        """Outer steps in the global parameters that the module goes on from, on all fragments together."""
        return self._now.version

    @property
    def steps_since_sync(self) -> int:
        """Inner steps since the last sync of any fragment: with one, those that are not in the global parameters."""
        return self._now.steps_since_sync

    @property
    def residual_norm(self) -> float | None:
        """L2 norm of what the codec owes to the next contribution; None where it leaves nothing out."""
        return self._now.residual_norm

    def state_dict(self) -> dict[str, Any]:
        """All that a continuation needs, at a step boundary: module, optimizer and data position, torch's random
        numbers, counters, the global parameters, what the codec owes, and a sync that is under way.

        Tensors and plain values, as far as the data's own state is. The module's and the optimizer's tensors are not
        copies: save them before the next step. Each rank has its own; that of rank 0 is complete, and the others have
        what is their own: save all.
        """
        return {
            "format": STATE_FORMAT,
            "slot": self.slot,
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "steps_since_attempt": self._counts.since_attempt,
            **({"fragments": [], "overlapped": None} if self._lead is None else self._lead.state()),
            "module": self._module.state_dict(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "data": None if self._data is None else self._data.state_dict(),
            "random": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on from what `state_dict` returned, in an island of the same slot, ranks, model, optimizer and data.

        Returns:
            True if all goes on as if nothing had been. False if the run has gone on meanwhile, without this island or
            with it (also where a later contribution of it waits in the open round): what it has moved of the module is
            then as it is globally now, and the steps since its last sync are dropped, for they may be in the run
            already. That goes for each fragment alone. Optimizer, data and counters are continued in both cases.

        Raises:
            InputError: it is no such state, or one of another slot, rank, model or run.
            ManifestError: the synchronizer has come to hold a run of another model.
            UnavailableError: the synchronizer does not answer.
            PeerLostError: another rank is gone; the island is closed then.
        """
        self._require_open()
        states = self._checked(state)
        if self._lead is not None:
            self.last_sync = self._lead.finish() or self.last_sync
        self._module.load_state_dict(state["module"])
        if self._optimizer is not None and state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._data is not None and state["data"] is not None:
            self._data.load_state_dict(state["data"])
        restore_random_state(state["random"])
        self._counts.num_steps, self._counts.num_tokens = state["num_steps"], state["num_tokens"]
        self._counts.since_attempt = state["steps_since_attempt"]

        def restore() -> bool:
            assert self._lead is not None
            return self._lead.restore(states, state)

        self._told = self._together(restore, lambda exact: self._require_lead().told(exact=exact), anew=True)
        return self._told.exact

    def close(self) -> None:
        """Apply what an overlapped sync still brings, then leave the run. Steps since the last sync stay local.

        All ranks call it.
        """
        if self._closed:
            return
        try:
            self._synced(Lead.finish)
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

    @property
    def _rank(self) -> int:
        return 0 if self._circle is None else self._circle.rank

    @property
    def _num_ranks(self) -> int:
        return 1 if self._circle is None else self._circle.num_ranks

    @property
    def _now(self) -> Told:
        return self._told if self._lead is None else self._lead.told()

    def _require_lead(self) -> Lead:
        assert self._lead is not None, "rank 0 leads"
        return self._lead

    def _meet(self, tokens: int) -> tuple[int, Order]:
        """The tokens of all ranks, and what comes at this step boundary."""
        circle, refusal, order = self._circle, None, Order.NONE

        def hold() -> None:
            if circle is not None:
                circle.meet(self.num_steps, 0, Order.HOLD)

        if self._lead is not None:
            try:
                order = self._lead.order(hold)
            except ConflictError as exc:
                order, refusal = Order.STOP, exc
        total = tokens
        if circle is not None:
            total, order = circle.meet(self.num_steps, tokens, order)
        if order is Order.STOP:
            raise refusal or ConflictError(
                f"the controller has taken slot {self.slot} back", field="slot", remedy="end this process"
            )
        return total, order

    def _synced(self, work: Callable[[Lead], SyncReport | None]) -> SyncReport | None:
        """Have rank 0 do what it says, and all ranks go on from there; the report of the sync that ended."""
        self._told = self._together(
            lambda: work(self._require_lead()), lambda report: self._require_lead().told(report)
        )
        if self._told.report is not None:
            self.last_sync = self._told.report
        return self._told.report

    def _together(self, work: Callable[[], T], tell: Callable[[T], Told], *, anew: bool = False) -> Told:
        with self._closed_after_errors():
            if self._circle is None:
                return tell(work())
            if self._rank == 0:
                return self._circle.lead(lambda: tell(work()), anew=anew)
            return self._circle.follow(anew=anew)

    def _checked(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The states of the fragments; none where this is not rank 0. Refused on one rank, a state is on all."""
        states: list[dict[str, Any]] = []
        error: WadilocoError | None = None
        try:
            require_state_of(state, slot=self.slot, rank=self._rank, num_ranks=self._num_ranks)
            if self._lead is not None:
                num_values = [fragment.global_flat.numel() for fragment in self._lead.member.fragments]
                states = fragment_states(state, num_values=num_values)
        except WadilocoError as exc:
            error = exc
        if self._circle is not None:
            with self._closed_after_errors():
                self._circle.require_all(error)
        elif error is not None:
            raise error
        return states

    @contextmanager
    def _closed_after_errors(self) -> Iterator[None]:
        """Without all ranks, or with different ones, there is no island any more."""
        try:
            yield
        except (PeerLostError, RanksDifferError):
            self._leave()
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise ConflictError("is closed", field="island", remedy="make a new Island, and give it the state")

    def _leave(self) -> None:
        """Out of the run, without waiting for anything but a short farewell."""
        self._closed = True
        if self._lead is not None:
            self._lead.leave()
        if self._circle is not None:
            self._circle.close()
