"""Safepoints: when a trainer waits, what ends the wait, and what a wait leaves behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from diloco.inner import InnerConfig, InnerLoop
from diloco.model import ModelSize, build_model, next_byte_loss
from diloco.safepoint import (
    LONGEST_REST_S,
    POLL_S,
    SPACING_S,
    Patience,
    Safepoint,
    YieldInterrupted,
    hooked,
    layers_of,
    open_gate,
    spaced_out,
)
from sidecar.vllm_plugin.gate_reader import GateReason, GateState
from sidecar.vllm_plugin.gate_writer import GateWriter
from sidecar.vllm_plugin.records import SlotFlag

OPEN = GateState(False, GateReason.IDLE, "ingress", 0)
BUSY = GateState(True, GateReason.IN_FLIGHT, "ingress", 1)
UNKNOWN = GateState(True, GateReason.NO_WRITER)
HALF_PACE = GateState(False, GateReason.IDLE, "ingress", 0, pace=0.5)
SIZE = ModelSize(num_layers=3, num_heads=2, width=16, context=8)


class ScriptedTime:
    """A clock that only a sleep moves, and a gate that is a function of it."""

    def __init__(self, gate: Callable[[float], GateState]) -> None:
        self.now_s = 100.0
        self._gate = gate
        self.num_reads = 0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert 0 < duration_s <= POLL_S
        self.now_s += duration_s

    def read(self, now_s: float) -> GateState:
        self.num_reads += 1
        return self._gate(now_s - 100.0)

    def safepoint(self, patience: Patience | None = None, **options: Callable[[], bool]) -> Safepoint:
        return Safepoint(self, patience=patience, clock=self.clock, sleep=self.sleep, **options)  # type: ignore[arg-type]


def busy_until(end_s: float, closed: GateState = BUSY) -> Callable[[float], GateState]:
    return lambda t_s: closed if t_s < end_s else OPEN


def test_an_open_gate_is_passed_with_one_read() -> None:
    scripted = ScriptedTime(lambda _: OPEN)
    safepoint = scripted.safepoint()
    safepoint()
    assert (scripted.num_reads, scripted.now_s, safepoint.yielded.total_s) == (1, 100.0, 0.0)


def test_a_busy_gate_holds_the_trainer_until_it_opens() -> None:
    scripted = ScriptedTime(busy_until(0.25))
    safepoint = scripted.safepoint()
    safepoint()
    assert scripted.now_s - 100.0 == pytest.approx(0.25, abs=2 * POLL_S)
    assert safepoint.yielded.total_s == pytest.approx(0.25, abs=2 * POLL_S)
    assert (safepoint.yielded.times, safepoint.yielded.reason) == (1, None)


def test_a_busy_gate_is_waited_for_without_end() -> None:
    scripted = ScriptedTime(busy_until(50.0))
    scripted.safepoint(Patience(patience_s=1.0, trickle_s=1.0))()
    assert scripted.now_s >= 150.0


def test_an_unknown_gate_lets_a_trickle_of_steps_pass() -> None:
    scripted = ScriptedTime(lambda _: UNKNOWN)
    safepoint = scripted.safepoint(Patience(patience_s=5.0, trickle_s=2.0))
    starts = []
    for _ in range(4):
        safepoint.start_step()
        starts.append(scripted.now_s - 100.0)
        safepoint()  # the safepoints within the step that was let through
        assert scripted.now_s - 100.0 == starts[-1]
        safepoint.end_step()
    assert starts == pytest.approx([5.0, 7.0, 9.0, 11.0], abs=0.02)


def test_known_load_ends_a_trickle() -> None:
    scripted = ScriptedTime(lambda t_s: UNKNOWN if t_s < 6.0 else BUSY if t_s < 8.0 else OPEN)
    safepoint = scripted.safepoint(Patience(patience_s=5.0, trickle_s=10.0))
    safepoint.start_step()
    scripted.now_s = 106.5
    safepoint()
    assert scripted.now_s >= 108.0


def test_patience_begins_anew_after_the_load_was_known() -> None:
    scripted = ScriptedTime(lambda t_s: OPEN if 3.0 <= t_s < 3.5 else UNKNOWN)
    safepoint = scripted.safepoint(Patience(patience_s=5.0, trickle_s=1.0))
    safepoint()
    scripted.now_s = 103.6
    safepoint()
    assert scripted.now_s == pytest.approx(108.6, abs=0.02)


def test_pace_is_the_share_of_the_time_that_the_trainer_runs() -> None:
    scripted = ScriptedTime(lambda _: HALF_PACE)
    safepoint = scripted.safepoint()
    for _ in range(100):
        scripted.now_s += 0.02
        safepoint()
    assert safepoint.yielded.total_s == pytest.approx(100 * 0.02, rel=0.05)


def test_a_pace_near_zero_is_looked_up_every_second() -> None:
    scripted = ScriptedTime(lambda _: GateState(False, GateReason.IDLE, pace=1e-6))
    safepoint = scripted.safepoint()
    scripted.now_s += 1.0
    safepoint()
    assert scripted.now_s == pytest.approx(101.0 + LONGEST_REST_S, abs=2 * POLL_S)


def test_an_order_ends_the_wait_and_a_step_that_it_ends_is_counted() -> None:
    scripted = ScriptedTime(lambda _: BUSY)
    safepoint = scripted.safepoint(has_order=lambda: scripted.now_s >= 100.1)
    with pytest.raises(YieldInterrupted):
        safepoint.start_step()
    assert (safepoint.yielded.abandoned_steps, safepoint.yielded.reason) == (0, None)
    gate_opens = ScriptedTime(lambda t_s: OPEN if t_s < 1.0 else BUSY)
    safepoint = gate_opens.safepoint(has_order=lambda: gate_opens.now_s >= 102.0)
    safepoint.start_step()
    gate_opens.now_s += 1.5
    with pytest.raises(YieldInterrupted):
        safepoint()
    assert safepoint.yielded.abandoned_steps == 1


def test_an_order_does_not_disturb_a_step_whose_gate_is_open() -> None:
    scripted = ScriptedTime(lambda _: OPEN)
    scripted.safepoint(has_order=lambda: True)()


def test_layers_are_what_owns_a_matrix() -> None:
    model = build_model(SIZE, seed=0)
    assert len(layers_of(model)) == 4 * SIZE.num_layers + 2  # and two embeddings
    plain = torch.nn.Linear(2, 2)
    assert layers_of(plain) == [plain]
    without = torch.nn.LayerNorm(2)
    assert layers_of(without) == [without]


@pytest.mark.parametrize(("step_s", "kept"), [(0.0, 0), (SPACING_S, 0), (8 * SPACING_S, 4), (1.0, 10)])
def test_short_steps_have_few_safepoints(step_s: float, kept: int) -> None:
    layers = [torch.nn.Linear(1, 1) for _ in range(10)]
    chosen = spaced_out(layers, step_s)
    assert len({id(layer) for layer in chosen}) == kept
    assert [layer for layer in layers if layer in chosen] == chosen


def test_every_layer_has_a_safepoint_in_both_directions_and_none_remain() -> None:
    model = build_model(SIZE, seed=0)
    tokens = torch.randint(0, 256, (2, SIZE.context + 1))
    passed: list[int] = []
    with hooked(layers_of(model), lambda: passed.append(len(passed))):
        next_byte_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    assert len(passed) == 2 * len(layers_of(model))
    next_byte_loss(model, tokens).backward()  # type: ignore[no-untyped-call]
    assert len(passed) == 2 * len(layers_of(model))


@pytest.mark.parametrize("interrupted_at", range(1, 2 * (4 * SIZE.num_layers + 2) + 2))
def test_a_step_given_up_at_any_safepoint_leaves_no_trace(interrupted_at: int) -> None:
    batches = [torch.randint(0, 256, (2, SIZE.context + 1)) for _ in range(3)]
    passed = 0

    def interrupt() -> None:
        nonlocal passed
        passed += 1
        if passed == interrupted_at:
            raise YieldInterrupted

    plain = train(batches)
    model = build_model(SIZE, seed=0)
    loop = InnerLoop(model, InnerConfig(), safepoint=interrupt)
    with hooked(layers_of(model), interrupt):
        with pytest.raises(YieldInterrupted):
            loop.take_step(batches[0])
        for batch in batches:
            assert loop.take_step(batch)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


class Tied(torch.nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).relu())
        return y


def cnn() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.BatchNorm2d(2),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(2, 2, 3),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * 4 * 4, 4),
    )


def partly_frozen() -> torch.nn.Module:
    """The first layer's output has no gradient: there is no backward pass to stop in."""
    return torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4))


def lstm() -> torch.nn.Module:
    return torch.nn.LSTM(4, 4, num_layers=2)


@pytest.mark.parametrize(
    ("build", "shape", "num_layers", "num_passed"),
    [(cnn, (2, 1, 8, 8), 3, 6), (Tied, (2, 4), 2, 4), (partly_frozen, (2, 4), 2, 3), (lstm, (3, 2, 4), 1, 2)],
)
def test_any_model_can_be_stopped_and_goes_on_as_if_it_had_not_been(
    build: Callable[[], torch.nn.Module], shape: tuple[int, ...], num_layers: int, num_passed: int
) -> None:
    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = model(batch)
        tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return tensor.square().mean()

    def parameters_after(interrupted_at: int | None) -> tuple[list[torch.Tensor], int]:
        passed = 0

        def maybe_interrupt() -> None:
            nonlocal passed
            passed += 1
            if passed == interrupted_at:
                raise YieldInterrupted

        torch.manual_seed(0)
        model, batch = build(), torch.rand(shape)
        loop = InnerLoop(model, InnerConfig(), loss=loss_of)
        layers = layers_of(model)
        assert len(layers) == num_layers
        with hooked(layers, maybe_interrupt):
            if interrupted_at is not None:
                with pytest.raises(YieldInterrupted):
                    loop.take_step(batch)
            assert loop.take_step(batch)
        return list(model.parameters()), passed

    plain, passed = parameters_after(None)
    assert passed == num_passed
    for interrupted_at in range(1, num_passed + 1):
        again, _ = parameters_after(interrupted_at)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def train(batches: list[torch.Tensor]) -> torch.nn.Module:
    model = build_model(SIZE, seed=0)
    loop = InnerLoop(model, InnerConfig())
    for batch in batches:
        loop.take_step(batch)
    return model


@contextmanager
def ingress(directory: Path) -> Iterator[GateWriter]:
    writer = GateWriter(directory, SlotFlag.INGRESS)
    yield writer
    writer.close()


def test_a_trainer_waits_for_a_real_gate_at_little_cost(tmp_path: Path) -> None:
    waiting = threading.Event()
    gate = open_gate(tmp_path)
    with ingress(tmp_path) as writer:
        writer.update(in_flight=1)
        safepoint = Safepoint(gate, on_wait=waiting.set)
        cpu_s: list[float] = []

        def run() -> None:
            before_s = time.thread_time()
            safepoint()
            cpu_s.append(time.thread_time() - before_s)

        thread = threading.Thread(target=run)
        thread.start()
        assert waiting.wait(10)
        opened = threading.Timer(0.3, writer.update, kwargs={"in_flight": 0})
        opened.start()
        thread.join(10)
        opened.join()
    gate.close()
    assert not thread.is_alive()
    assert safepoint.yielded.total_s > 0.1
    assert cpu_s[0] < 0.5 * safepoint.yielded.total_s
