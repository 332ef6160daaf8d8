"""Delayed Nesterov against the NumPy reference, against plain Nesterov, and over restarts of the synchronizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from diloco.delayed_nesterov import Delay, DelayedNesterov
from diloco.outer import Contribution, OuterOptimizer
from diloco.schema import Manifest, TensorSpec
from diloco.synchronizer.config import MAX_DELAY, SynchronizerSettings
from diloco.synchronizer.generation import newest_generation
from diloco.transport import SynchronizerClient
from tests.diloco import reference
from tests.diloco.conftest import served
from tests.diloco.reference import Vector

SIZE = 301
LR, MU = 0.7, 0.9
MANIFEST = Manifest(tensors=(TensorSpec(name="weight", shape=(SIZE,), dtype="float32"),))
DELAYED: dict[str, Any] = {"outer_optimizer": "delayed_nesterov", "outer_delay": 3, "grace_max_s": 0.0}

seeds = st.integers(0, 2**31 - 1)


def vector(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def wide(tensor: Tensor) -> Vector:
    return tensor.numpy().astype(np.float64)


def delayed(delay: Delay, *, lr: float = LR, mu: float = MU) -> DelayedNesterov:
    return DelayedNesterov(vector(0), torch.zeros(SIZE), lr=lr, mu=mu, delay=delay)


@given(
    rounds=st.lists(st.lists(st.tuples(seeds, st.integers(1, 1000)), min_size=1, max_size=4), min_size=1, max_size=9),
    num_steps=st.integers(1, 5),
    spread=st.floats(0, 1),
    lr=st.sampled_from([0.1, 0.7, 1.0]),
    mu=st.sampled_from([0.0, 0.5, 0.9]),
)
@settings(max_examples=40)
def test_delayed_steps_follow_the_reference(
    rounds: list[list[tuple[int, int]]], num_steps: int, spread: float, lr: float, mu: float
) -> None:
    activation = spread / num_steps
    outer = delayed(Delay(num_steps=num_steps, activation=activation), lr=lr, mu=mu)
    expected = reference.Delayed(
        parameters=wide(vector(0)), momentum=np.zeros(SIZE), lr=lr, mu=mu, num_steps=num_steps, activation=activation
    )
    for members in rounds:
        given_ = {
            slot: Contribution(local=outer.parameters + vector(seed, 0.1), tokens=tokens)
            for slot, (seed, tokens) in enumerate(members)
        }
        terms = [
            reference.Term(pseudo_gradient=expected.parameters - wide(each.local), tokens=each.tokens)
            for each in given_.values()
        ]
        outer.propose(given_)
        outer.propose(given_)  # a step that could not be written is proposed again
        outer.commit()
        expected.step(reference.mean_pseudo_gradient(terms))
        np.testing.assert_allclose(outer.parameters.numpy(), expected.parameters, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(outer.momentum.numpy(), expected.momentum, rtol=1e-4, atol=1e-4)
        assert outer.delay.position == len(expected.received)


def test_without_a_delay_it_is_nesterov_bit_for_bit() -> None:
    plain = OuterOptimizer(vector(0), torch.zeros(SIZE), lr=LR, mu=MU)
    outer = delayed(Delay(num_steps=1))
    for number in range(5):
        for optimizer in (plain, outer):
            optimizer.propose({0: Contribution(local=vector(number), tokens=1)})
            optimizer.commit()
        assert torch.equal(outer.parameters, plain.parameters)
        assert torch.equal(outer.momentum, plain.momentum)


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
def test_as_many_steps_as_the_delay_move_as_far_as_one_of_nesterov_on_their_mean(activation: float) -> None:
    """But for the momentum in between, which with an activation is that of before."""
    outer = delayed(Delay(num_steps=4, activation=activation))
    outer.momentum.copy_(vector(9))
    before, mean = outer.parameters.clone(), torch.zeros(SIZE)
    for number in range(4):
        delta = vector(100 + number)
        mean += delta / 4
        outer.propose({0: Contribution(local=outer.parameters - delta, tokens=1)})
        outer.commit()
    momentum = MU * vector(9) + mean
    weight = 1 - 4 * activation + activation
    moved = mean + weight * MU * momentum + 3 * activation * MU * vector(9)
    torch.testing.assert_close(outer.parameters, before - LR * moved, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outer.momentum, momentum, rtol=1e-4, atol=1e-5)
    assert not outer.buffer.any()


class Peer:
    """A synchronizer that is started again with its directory."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=10, trust_env=False)
        self.client = SynchronizerClient(self.http)
        self.client.init(MANIFEST, vector(0), deadline_s=time.time() + 20)

    def close_rounds(self, start: int, stop: int) -> Tensor:
        flat = torch.empty(SIZE)
        for number in range(start, stop):
            self.client.pull(number, flat, deadline_s=time.time() + 20)
            local = flat - vector(10 + number, 0.1)
            self.client.push(local, round=number, slot=0, epoch=0, tokens=5, deadline_s=time.time() + 20)
            assert self.client.wait_version(number, deadline_s=time.time() + 20) == number + 1
        self.client.pull(stop, flat, deadline_s=time.time() + 20)
        self.http.close()
        return flat


@pytest.mark.parametrize("pull_codec", ["fp32", "int8"])
def test_a_restart_between_two_steps_of_the_momentum_changes_no_bit(tmp_path: Path, pull_codec: str) -> None:
    def run(name: str, stops: list[int]) -> Tensor:
        options = SynchronizerSettings(port=0, directory=tmp_path / name, pull_codec=pull_codec, **DELAYED)
        for start, stop in zip([0, *stops], stops, strict=False):
            with served(options) as url:
                result = Peer(url).close_rounds(start, stop)
        return result

    expected = run("undisturbed", [8])
    assert torch.equal(run("restarted", [1, 2, 5, 8]), expected)
    found = newest_generation(tmp_path / "restarted")
    assert found is not None
    assert found[0].outcome.delay == Delay(num_steps=3, position=2)
    tensors = load_file(found[0].path)
    assert tensors["buffer.weight"].abs().sum() > 0
    undelayed = SynchronizerSettings(port=0, directory=tmp_path / "plain", grace_max_s=0.0)
    with served(undelayed) as url:
        assert not torch.equal(Peer(url).close_rounds(0, 8), expected)


def test_a_run_may_begin_and_end_to_delay(tmp_path: Path, serve: Callable[..., str]) -> None:
    for start, options in ((0, {}), (2, DELAYED), (4, DELAYED | {"outer_delay": 2}), (6, {"grace_max_s": 0.0})):
        with served(SynchronizerSettings(port=0, directory=tmp_path, **options)) as url:
            Peer(url).close_rounds(start, start + 2)
    found = newest_generation(tmp_path)
    assert found is not None
    assert found[0].outcome.delay is None
    assert found[0].buffer() is None


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"momentum_activation": 0.5}, "momentum_activation 0.5 is over one in outer_delay 3"),
        ({"momentum_activation": -0.1}, "momentum_activation"),
        ({"outer_delay": 0}, "outer_delay"),
        ({"outer_delay": MAX_DELAY + 1}, "outer_delay"),
        ({"outer_optimizer": "adam"}, "outer_optimizer"),
    ],
    ids=["too much", "negative", "none", "too long", "unknown"],
)
def test_settings_out_of_bounds_are_refused(tmp_path: Path, options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        SynchronizerSettings(port=0, directory=tmp_path, **(DELAYED | options))
