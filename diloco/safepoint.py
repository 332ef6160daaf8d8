"""Safepoints: where a trainer looks at the gate of the server beside it, and waits while that server has work.

Hooks before and after every layer, forward and backward, and calls between micro-batches and steps; never inside a
collective, and never with a lock in hand. The wait polls with sleeps of at most 1 ms, about 1 % of a core.

    gate open                → go on; with a pace p < 1, rest so that running takes the share p of the time
    gate busy                → wait
    gate unknown             → wait, at most ``patience_s``; then a trickle: one step per ``trickle_s``
    an order from the agent  → `YieldInterrupted`: the step is given up, its batch is taken again

Giving a step up costs the part of it that was done and changes no parameter: they move only after the last safepoint.
Buffers that a forward pass moves (running statistics of a BatchNorm) have then moved once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from sidecar.vllm_plugin.gate_reader import GateReader, GateState

POLL_S = 0.001
PACE = "pace"
SPACING_S = 0.0008
"""A hook and its safepoint take some 5 µs: at this distance, well under 1 % of a step."""
STEPS_TO_SPACE_OUT = 5
"""Steps that are timed to find how many safepoints they can bear; the shortest counts."""
LONGEST_REST_S = 1.0
"""Of pace: a pace close to 0 still looks up every second whether it changed."""


class YieldInterrupted(Exception):  # noqa: N818 (not an error: an order came while the trainer waited)
    """The agent has an order, and the gate is not open."""


class Gate(Protocol):
    """What tells whether the server is busy."""

    def read(self, now_s: float) -> GateState: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a trainer trusts nobody's word."""

    patience_s: float = 60.0
    """Longest wait while the load is unknown."""
    trickle_s: float = 10.0
    """From then on, one step per so many seconds."""


@dataclass(slots=True)
class Trickle:
    """Lets one step pass now and then while the load is unknown (pure)."""

    patience: Patience
    unknown_since_s: float | None = None
    _granted_s: float | None = None
    _is_passing: bool = False

    def lets_pass(self, now_s: float, *, is_known: bool) -> bool:
        """Whether to go on, although the gate is not open."""
        if is_known:
            self.forget()
            return False
        if self._is_passing:
            return True
        if self.unknown_since_s is None:
            self.unknown_since_s = now_s
        if self._granted_s is None:
            is_due = now_s >= self.unknown_since_s + self.patience.patience_s
        else:
            is_due = now_s >= self._granted_s + self.patience.trickle_s
        if is_due:
            self._granted_s = now_s
            self._is_passing = True
        return is_due

    def forget(self) -> None:
        """The load is known: patience begins anew."""
        self.unknown_since_s = self._granted_s = None
        self._is_passing = False

    def end_step(self) -> None:
        """A pass is for one step."""
        self._is_passing = False


@dataclass(slots=True)
class Yielded:
    """What waiting has cost so far."""

    total_s: float = 0.0
    times: int = 0
    abandoned_steps: int = 0
    reason: str | None = None
    """Why the trainer waits now; None while it runs."""


class Safepoint:
    """Call it wherever the trainer may wait; `start_step` and `end_step` bracket what a trickle lets pass."""

    def __init__(
        self,
        gate: Gate,
        *,
        patience: Patience | None = None,
        has_order: Callable[[], bool] = lambda: False,
        on_wait: Callable[[], None] = lambda: None,
        catch_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``has_order`` ends a wait; ``on_wait`` is called on every poll, and should do nothing most of the time.

        ``catch_up`` comes before the look at the gate: it waits for a GPU to which too much has been given.
        """
        self._catch_up = catch_up
        self._gate = gate
        self._trickle = Trickle(patience or Patience())
        self._has_order = has_order
        self._on_wait = on_wait
        self._clock = clock
        self._sleep = sleep
        self._ran_since_s = clock()
        self._is_in_step = False
        self.yielded = Yielded()

    def __call__(self) -> None:
        """Go on at once if the gate is open, else when it opens.

        Raises:
            YieldInterrupted: an order came first.
        """
        self._catch_up()
        now_s = self._clock()
        state = self._gate.read(now_s)
        if not state.busy and state.pace >= 1.0:
            self._trickle.forget()
            self._ran_since_s = now_s
            return
        if state.busy:
            self._wait_until_open(state, now_s)
        else:
            self._rest(state, now_s)
        self._ran_since_s = self._clock()

    def start_step(self) -> None:
        """The safepoint before a step: an order that ends its wait costs nothing."""
        self._is_in_step = False
        self()
        self._is_in_step = True

    def end_step(self) -> None:
        """The step is over: a trickle lets the next one pass anew."""
        self._is_in_step = False
        self._trickle.end_step()

    def _wait_until_open(self, state: GateState, started_s: float) -> None:
        now_s = started_s
        if self._trickle.lets_pass(now_s, is_known=state.is_known):
            return
        self.yielded.times += 1
        try:
            while state.busy and not self._trickle.lets_pass(now_s, is_known=state.is_known):
                self.yielded.reason = str(state.reason)
                self._pause(POLL_S)
                before_s, now_s = now_s, self._clock()
                self.yielded.total_s += now_s - before_s
                state = self._gate.read(now_s)
        finally:
            self.yielded.reason = None
        if not state.busy:
            self._trickle.forget()

    def _rest(self, state: GateState, now_s: float) -> None:
        """Rest after a run of r seconds for r·(1 - p)/p."""
        ran_s = now_s - self._ran_since_s
        until_s = now_s + min(ran_s * (1.0 - state.pace) / state.pace, LONGEST_REST_S)
        self.yielded.reason = PACE
        try:
            while now_s < until_s:
                self._pause(min(POLL_S, until_s - now_s))
                before_s, now_s = now_s, self._clock()
                self.yielded.total_s += now_s - before_s
        finally:
            self.yielded.reason = None

    def _pause(self, duration_s: float) -> None:
        if self._has_order():
            self.yielded.abandoned_steps += self._is_in_step
            raise YieldInterrupted
        self._on_wait()
        self._sleep(duration_s)


def pass_by() -> None:
    """The safepoint of a trainer without a gate."""


def open_gate(directory: Path) -> GateReader:
    """The reader of the gate in a folder; neither the folder nor a writer has to be there yet."""
    return GateReader(directory)


@contextmanager
def hooked(layers: Iterable[nn.Module], safepoint: Callable[[], None]) -> Iterator[None]:
    """Pass the safepoint before each layer's forward and backward pass, while the block lasts."""
    handles: list[Any] = []

    def before_forward(*_: Any) -> None:
        safepoint()

    def after_forward(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        # The gradient of its output is where a layer's backward pass begins. The module's own backward hooks put nodes
        # into the graph: 0.6 ms per step of four layers were measured with them, 0.2 ms with these.
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]

    def before_backward(_: Tensor) -> None:
        safepoint()

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(before_forward))
        handles.append(layer.register_forward_hook(after_forward))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that own a weight matrix, in the model's order: nearly all of the work lies between them.

    Whole blocks would be too coarse: a request that arrives while the trainer runs shares its core until the next
    safepoint, and the longest way between two was a sixth of a step with blocks, a twentieth with matrices.
    """
    return [
        module for module in model.modules() if any(each.ndim > 1 for each in module.parameters(recurse=False))
    ] or [model]


def spaced_out(layers: Sequence[nn.Module], step_s: float) -> list[nn.Module]:
    """Those of ``layers`` that leave at least about `SPACING_S` between two safepoints of a step of ``step_s``."""
    most = int(step_s / (2 * SPACING_S))
    if most >= len(layers):
        return list(layers)
    return [layers[index * len(layers) // most] for index in range(most)]
