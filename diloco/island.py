"""The state of one island between outer steps, and the arithmetic of leaving and joining a round.

All of it is of the parameters that sync together: of the whole model, or of one fragment (see `diloco.streaming`).

With g the global parameters at the last sync and l the local ones, the pseudo-gradient is Δ = g - l (Douillard et al.,
2023, arXiv 2311.08105). An fp32 contribution carries l itself, because an fp32 Δ cannot: where l is small against g (a
weight that passes through zero), fl(g - fl(g - l)) ≠ l. The synchronizer holds g, so it knows Δ all the same, and its
outer step written as an interpolation, g ← (1 - lr)·g + lr·l - lr·μ·m, gives exactly l for lr = 1 and μ = 0: DiLoCo
with one island and H = 1 is then plain training, bit for bit.

New global parameters g' are adopted at a step boundary as

    l ← g' + (l - base)

where base is the part of the local progress that g' already has in it: l as it was pushed if that contribution was in
the round, g if it was not (the progress is kept for the next round). If no step was taken since the push, l ← g'.

A contribution that came too late for its round, and was taken into the one that is open at g', is adopted as if it were
not in g' (`Island.carry`). What the island then holds of it is l as pushed - g + g': when that round's result g" comes,
base is that, unless newer progress has taken its place in the round until then.

With a codec that loses something (`diloco.codec`) a contribution carries Δ and what earlier ones left out of theirs.
Base is l as pushed all the same: what this one left out is owed to the next (`diloco.feedback`), and not a part of l.
Where the global parameters travel encoded (`diloco.delta`), g is what is published, the same on all islands.

Only `Island.capture` and what adopts touch the module, and are for a step boundary; `Island.encode` may run beside the
inner steps. Memory is allocated once and used again, 4 bytes per parameter each: g, g', room for `Island.update_norm`,
and l of a contribution; with a codec that loses something also what is owed, and what the contribution leaves out. A
contribution of which nobody knows yet what became of it keeps its own, so that the next one takes as much again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from diloco.codec import CODECS, Codec, new_bytes, new_vector
from diloco.feedback import Encoded, ErrorFeedback
from diloco.fragment import flatten_module, manifest_of, shift_module, unflatten_into
from diloco.schema import Manifest
from diloco.stages import STAGES, Stage
from service.errors import InputError, WadilocoError

NORM_BLOCK = 1 << 18


class NonFiniteError(WadilocoError):
    """The local parameters hold NaN or infinity: they must not leave the island."""


@dataclass(slots=True, kw_only=True)
class Workspace:
    """Memory of one contribution."""

    local: Tensor  # (parameters,) fp32
    left_out: Tensor  # (parameters,) fp32, none where the codec loses nothing
    payload: Tensor  # (bytes,) uint8, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The local parameters at a step boundary, and what led to them."""

    round: int
    """Version of the global parameters that they are against."""
    workspace: Workspace
    inner_steps: int
    tokens: int
    stamp: int = 0
    """Names the values of ``workspace.local``, within this island."""
    run: str | None = None
    """Identity of the run whose version that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What an island gives to one round."""

    round: int
    """Version of the global parameters that it is against."""
    local: Tensor  # (parameters,) fp32, a copy
    payload: Tensor  # (bytes,) uint8: what travels
    inner_steps: int
    tokens: int
    update_norm: float
    into: int | None = None
    """Round that it was taken into, once the synchronizer has said so."""
    encoded: Encoded | None = None
    """The payload with what it leaves out; None where that is nothing."""
    stamp: int = 0
    """That of the capture: names the values of ``local``."""
    digest: str | None = None
    """sha-256 of the payload, hex, once the synchronizer has said so."""

    @property
    def in_round(self) -> int:
        return self.round if self.into is None else self.into


class Island:
    """A module, the global parameters that it last adopted, and what it did since."""

    def __init__(
        self, module: nn.Module, codec: Codec = CODECS["fp32"], *, names: Collection[str] | None = None
    ) -> None:
        """The module as it stands is version 0 of the global parameters until `rebase` says otherwise.

        ``names`` are the parameters of the fragment that this is about; None: all.
        """
        self.module = module
        self.codec = codec
        self._names = names
        self.version = 0
        self.run: str | None = None
        """Identity of the run that the version counts in; None while nobody said."""
        self.global_flat = self._flatten()
        self.steps_since_sync = 0
        self.tokens_since_sync = 0
        self.accepted: Contribution | None = None
        """Contribution that the synchronizer holds for a round of which this island has not seen the end."""
        self.feedback = None if codec.carries_parameters else ErrorFeedback(codec, self.global_flat.numel())
        """None where nothing is lost."""
        self.incoming = new_vector(self.global_flat.numel())
        """Where the next global parameters are put together; `adopt` takes it over, and leaves the old ones there."""
        self.revision = 0
        """Names the values of the global parameters: another one whenever they change."""
        self._stamp = 0
        self._workspaces: list[Workspace] = []
        self._scratch = torch.empty_like(self.global_flat)

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.module, names=self._names)

    def _flatten(self, *, out: Tensor | None = None) -> Tensor:
        return flatten_module(self.module, names=self._names, out=out)

    def _set(self, flat: Tensor) -> None:
        unflatten_into(flat, self.module, names=self._names)

    def count_step(self, tokens: int) -> None:
        """An inner step was taken on so many tokens."""
        self.steps_since_sync += 1
        self.tokens_since_sync += tokens

    def update_norm(self) -> float:
        """L2 norm of the pseudo-gradient so far."""
        difference = torch.sub(self.global_flat, self._flatten(out=self._scratch), out=self._scratch)
        return float(torch.linalg.vector_norm(difference))

    def contribution(self) -> Contribution:
        """The local parameters as they are now, for the round of the current version.

        Raises:
            NonFiniteError: they hold NaN or infinity, or their pseudo-gradient cannot be encoded.
        """
        return self.encode(self.capture())

    def capture(self, *, beside: Contribution | None = None) -> Capture:
        """Copy the local parameters, for a contribution to the round of the current version.

        The copy takes the place of the last one, unless that is `accepted`, or of the contribution ``beside``.
        """
        workspace = self._free_workspace(beside)
        with STAGES.of(Stage.CAPTURE):
            self._flatten(out=workspace.local)
        return Capture(
            round=self.version,
            workspace=workspace,
            inner_steps=self.steps_since_sync,
            tokens=self.tokens_since_sync,
            stamp=self._next_stamp(),
            run=self.run,
        )

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def recapture(self, *, inner_steps: int, tokens: int, fill: Callable[[Tensor], object]) -> Capture:
        """A capture of an earlier process, whose local parameters ``fill`` puts into the vector that it is given."""
        workspace = self._free_workspace(None)
        fill(workspace.local)
        return Capture(
            round=self.version,
            workspace=workspace,
            inner_steps=inner_steps,
            tokens=tokens,
            stamp=self._next_stamp(),
            run=self.run,
        )

    def captured_again(self) -> Capture | None:
        """The capture that became the accepted contribution."""
        accepted = self.accepted
        for workspace in self._workspaces:
            if accepted is not None and workspace.local is accepted.local:
                return Capture(
                    round=accepted.round,
                    workspace=workspace,
                    inner_steps=accepted.inner_steps,
                    tokens=accepted.tokens,
                    stamp=accepted.stamp,
                    run=self.run,
                )
        return None

    def reaccept(self, contribution: Contribution, *, fill: Callable[[Tensor, Tensor], object]) -> None:
        """Take over what the synchronizer holds of an earlier process.

        ``fill`` puts local parameters, and what was left out of them, into the vectors that it is given; those of
        ``contribution`` are not looked at.
        """
        workspace = self._free_workspace(None)
        fill(workspace.local, workspace.left_out)
        encoded = None
        if self.feedback is not None:
            norm = float(torch.linalg.vector_norm(workspace.left_out))
            encoded = Encoded(payload=workspace.payload, left_out=workspace.left_out, norm=norm)
        self.accepted = replace(
            contribution,
            local=workspace.local,
            payload=workspace.payload,
            encoded=encoded,
            stamp=self._next_stamp(),
        )

    def encode(self, captured: Capture) -> Contribution:
        """What travels of it. Touches no module, and nothing that changes before the next global parameters.

        Raises:
            NonFiniteError: it holds NaN or infinity, or its pseudo-gradient cannot be encoded.
        """
        workspace = captured.workspace
        local, encoded = workspace.local, None
        try:
            with STAGES.of(Stage.ENCODE):
                if self.feedback is None:
                    update_norm = distance(self.global_flat, local)
                    payload = self.codec.encode(local)
                else:
                    difference = torch.sub(self.global_flat, local, out=workspace.left_out)
                    update_norm = float(torch.linalg.vector_norm(difference))
                    encoded = self.feedback.encode(difference, out=workspace.payload)
                    payload = encoded.payload
        except InputError as exc:
            raise NonFiniteError(exc.message, field="model", remedy="lower lr or clip_norm") from exc
        return Contribution(
            round=captured.round,
            local=local,
            payload=payload,
            encoded=encoded,
            inner_steps=captured.inner_steps,
            tokens=captured.tokens,
            update_norm=update_norm,
            stamp=captured.stamp,
        )

    def _free_workspace(self, beside: Contribution | None) -> Workspace:
        taken = [contribution.local for contribution in (self.accepted, beside) if contribution is not None]
        for workspace in self._workspaces:
            if not any(workspace.local is local for local in taken):
                return workspace
        num_values = self.global_flat.numel()
        is_lossy = self.feedback is not None
        self._workspaces.append(
            Workspace(
                local=new_vector(num_values),
                left_out=new_vector(num_values if is_lossy else 0),
                payload=new_bytes(self.codec.num_bytes(num_values) if is_lossy else 0),
            )
        )
        return self._workspaces[-1]

    def adopt(self, new_global: Tensor, version: int, *, holds: bool | None = None) -> Contribution | None:
        """Go on from ``new_global``, keeping progress that is not in it; returns the own contribution that is.

        ``holds`` says whether `accepted` is in it; None leaves it to the version.
        """
        accepted, self.accepted = self.accepted, None
        if accepted is not None and holds is None:
            holds = version > accepted.in_round
        merged = accepted if holds else None
        if merged is not None:
            self.steps_since_sync -= merged.inner_steps
            self.tokens_since_sync -= merged.tokens
            self._settle(merged)
        with STAGES.of(Stage.ADOPT):
            if self.steps_since_sync:
                base = self.global_flat if merged is None else merged.local
                shift_module(self.module, base=base, to=new_global, names=self._names)
            else:
                self._set(new_global)
        if new_global is self.incoming:
            self.global_flat, self.incoming = self.incoming, self.global_flat
        else:
            self.global_flat.copy_(new_global)
        self.version = version
        self.revision += 1
        return merged

    def _settle(self, merged: Contribution) -> None:
        """Owe what it left out; the memory of what was owed before is its workspace's from now on."""
        if self.feedback is None or merged.encoded is None:
            return
        before = self.feedback.settle(merged.encoded)
        for workspace in self._workspaces:
            if workspace.local is merged.local:
                workspace.left_out = before

    def carry(self, accepted: Contribution, new_global: Tensor, version: int) -> None:
        """Go on with all local progress from ``new_global``, which has not the accepted contribution in it yet."""
        accepted.local.sub_(self.global_flat).add_(new_global)
        self.accepted = None
        self.adopt(new_global, version)
        self.accepted = replace(accepted, stamp=self._next_stamp())

    def go_over(self, new_global: Tensor, version: int, *, run: str) -> None:
        """Go on in another run with all local progress: nothing of it is in that one."""
        self.adopt(new_global, version, holds=False)
        self.run = run

    def rebase(self, new_global: Tensor, version: int) -> None:
        """Start from ``new_global``; local progress is dropped, and what is owed of earlier progress with it."""
        self.accepted = None
        if self.feedback is not None:
            self.feedback.forget()
        self.steps_since_sync = 0
        self.tokens_since_sync = 0
        self.adopt(new_global, version)


def distance(a: Tensor, b: Tensor) -> float:
    """L2 norm of the difference, with no memory for it."""
    blocks = zip(torch.split(a, NORM_BLOCK), torch.split(b, NORM_BLOCK), strict=True)
    return math.hypot(*(float(torch.linalg.vector_norm(left - right)) for left, right in blocks))
