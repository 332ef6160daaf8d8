"""The outer step, the islands' adoption and error feedback against the NumPy reference, over random sequences."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from diloco.codec import CODECS, new_vector
from diloco.digest import sha256
from diloco.feedback import ErrorFeedback
from diloco.fragment import flatten_module, unflatten_into, wire_bytes
from diloco.island import Contribution as Pushed
from diloco.island import Island
from diloco.outer import Contribution, OuterOptimizer
from diloco.schema import CodecName, Manifest, TensorSpec
from diloco.synchronizer.contribution import accept_contribution, begin_contribution
from diloco.synchronizer.generation import Generation, Outcome, write_generation
from diloco.synchronizer.rounds import Claim, staleness_weight
from diloco.synchronizer.step import Share, StepPlan, take_step
from diloco.synchronizer.storage import Disk
from diloco.synchronizer.upload import Chunk
from tests.diloco import reference
from tests.diloco.reference import Member, Outer, Term, Vector

SIZE = 193
EXPONENT = 0.5
MANIFEST = Manifest(tensors=(TensorSpec(name="weight", shape=(SIZE,), dtype="float32"),))

learning_rates = st.sampled_from([0.1, 0.7, 1.0])
momenta = st.sampled_from([0.0, 0.5, 0.9])
"""0 is plain SGD."""
tokens = st.one_of(st.integers(1, 1000), st.sampled_from([10**9, 2**53 - 1]))
seeds = st.integers(0, 2**31 - 1)


def vector(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def wide(tensor: Tensor) -> Vector:
    return tensor.numpy().astype(np.float64)


def assert_close(tensor: Tensor, expected: Vector) -> None:
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-4, atol=1e-4)


@given(
    rounds=st.lists(st.lists(st.tuples(seeds, tokens), min_size=1, max_size=5), min_size=1, max_size=6),
    lr=learning_rates,
    mu=momenta,
)
@settings(max_examples=30)
def test_outer_steps_follow_the_reference(rounds: list[list[tuple[int, int]]], lr: float, mu: float) -> None:
    start = vector(0)
    torch_outer = OuterOptimizer(start.clone(), torch.zeros(SIZE), lr=lr, mu=mu)
    outer = Outer(parameters=wide(start), momentum=np.zeros(SIZE), lr=lr, mu=mu)
    for members in rounds:
        # Islands end near where they started, as they do in training.
        locals_ = {slot: torch_outer.parameters + vector(seed, 0.1) for slot, (seed, _) in enumerate(members)}
        terms = [
            Term(pseudo_gradient=outer.parameters - wide(locals_[slot]), tokens=count)
            for slot, (_, count) in enumerate(members)
        ]
        torch_outer.propose({s: Contribution(local=locals_[s], tokens=count) for s, (_, count) in enumerate(members)})
        torch_outer.commit()
        outer.step(reference.mean_pseudo_gradient(terms))
        assert_close(torch_outer.parameters, outer.parameters)
        assert_close(torch_outer.momentum, outer.momentum)


class Rounds:
    """Outer steps as the synchronizer takes them: from files, into files."""

    def __init__(self, directory: Path, *, lr: float, mu: float) -> None:
        self.disk = Disk(directory)
        self.outcome = Outcome(outer_lr=lr, outer_momentum=mu)
        self.outer = OuterOptimizer(vector(0), torch.zeros(SIZE), lr=lr, mu=mu)
        first = write_generation(
            directory, 0, MANIFEST, self.outer.parameters, self.outer.momentum, outcome=self.outcome
        )
        self.generations: list[Generation] = [first]

    def share(self, payload: Tensor, *, slot: int, count: int, staleness: int, codec: CodecName) -> Share:
        newest = self.generations[-1]
        base = self.generations[newest.version - staleness]
        data = bytes(wire_bytes(payload))
        claim = Claim(round=base.version, slot=slot, epoch=0, tokens=count, codec=codec)
        chunk = Chunk(start=0, total=len(data), digest=sha256(data), data=data)
        upload = begin_contribution(self.disk.directory, claim, chunk)
        upload.append(chunk)
        accepted = accept_contribution(self.disk.directory, claim, upload, into=newest.version)
        return Share(accepted=accepted, base=base, weight=staleness_weight(staleness, exponent=EXPONENT))

    def close(self, shares: dict[int, Share]) -> None:
        step = take_step(self.disk, self.outer, StepPlan(base=self.generations[-1], shares=shares, epochs={}))
        self.outer.commit()
        self.generations.append(step.generation)


arrivals = st.tuples(
    seeds, tokens, st.integers(0, 4), st.sampled_from(sorted(CODECS)), st.integers(0, 7)
)  # progress, tokens, staleness, codec, slot


def by_slot(members: list[Any]) -> dict[int, Any]:
    return {slot: member for *member, slot in members}


@given(
    rounds=st.lists(st.lists(arrivals, min_size=1, max_size=4), min_size=1, max_size=5), lr=learning_rates, mu=momenta
)
@settings(max_examples=12)
def test_steps_with_several_stale_contributions_and_codecs_follow_the_reference(
    rounds: list[list[Any]], lr: float, mu: float
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = Rounds(Path(directory), lr=lr, mu=mu)
        outer = Outer(parameters=wide(vector(0)), momentum=np.zeros(SIZE), lr=lr, mu=mu)
        history = [outer.parameters]
        for members in rounds:
            shares, terms = {}, []
            for slot, (seed, count, wanted, codec, *_) in by_slot(members).items():
                staleness = min(wanted, len(history) - 1)
                local = torch.from_numpy(history[-1 - staleness]).float() + vector(seed, 0.1)
                difference = new_vector(SIZE).copy_(torch.from_numpy(history[-1 - staleness]).float() - local)
                carried = local if CODECS[codec].carries_parameters else difference
                payload = CODECS[codec].encode(carried)
                shares[slot] = run.share(payload, slot=slot, count=count, staleness=staleness, codec=codec)
                arrived = wide(CODECS[codec].decode(payload, SIZE))
                given_ = history[-1 - staleness] - arrived if CODECS[codec].carries_parameters else arrived
                terms.append(Term(pseudo_gradient=given_, tokens=count, staleness=staleness))
            run.close(shares)
            outer.step(reference.mean_pseudo_gradient(terms, exponent=EXPONENT))
            history.append(outer.parameters)
            assert_close(run.outer.parameters, outer.parameters)
            assert_close(run.outer.momentum, outer.momentum)


@given(members=st.lists(arrivals, min_size=2, max_size=4, unique_by=lambda member: member[-1]), data=st.data())
@settings(max_examples=12)
def test_the_order_in_which_contributions_come_changes_no_bit(members: list[Any], data: st.DataObject) -> None:
    def after(order: list[Any]) -> tuple[bytes, bytes]:
        with tempfile.TemporaryDirectory() as directory:
            run = Rounds(Path(directory), lr=0.7, mu=0.9)
            for number in range(3):
                newest = run.generations[-1].parameters().clone()
                run.close({0: run.share(newest + vector(number), slot=0, count=5, staleness=0, codec="fp32")})
            shares = {}
            for seed, count, wanted, codec, slot in order:
                staleness = min(wanted, 3)
                base = run.generations[3 - staleness].parameters()
                flat = new_vector(SIZE).copy_(vector(seed, 0.1))
                payload = CODECS[codec].encode(base + flat if CODECS[codec].carries_parameters else flat)
                shares[slot] = run.share(payload, slot=slot, count=count, staleness=staleness, codec=codec)
            run.close(shares)
            return bytes(wire_bytes(run.outer.parameters)), bytes(wire_bytes(run.outer.momentum))

    assert after(data.draw(st.permutations(members))) == after(members)


class Pair:
    """An island and its reference, taken through the same events."""

    def __init__(self, codec: CodecName) -> None:
        module = nn.Linear(SIZE - 1, 1)
        unflatten_into(vector(1), module)
        self.island = Island(module, CODECS[codec])
        lossy = not CODECS[codec].carries_parameters
        self.codec = codec
        self.member = Member(local=wide(vector(1)), base=wide(vector(1)), quantise=self._quantise if lossy else None)
        self.pushed: Pushed | None = None

    def _quantise(self, wanted: Vector) -> Vector:
        # What the island really sent: a value on the edge between two steps may round otherwise in fp64.
        assert self.pushed is not None
        sent = wide(CODECS[self.codec].decode(self.pushed.payload, SIZE))
        np.testing.assert_allclose(sent, wanted, atol=0.1 * np.abs(wanted).max() + 1e-5)
        return sent

    def train(self, seed: int, count: int) -> None:
        change = vector(seed, 0.1)
        unflatten_into(flatten_module(self.island.module) + change, self.island.module)
        self.island.count_step(count)
        self.member.train(wide(change), count)

    def push(self, *, staleness: int = 0) -> None:
        self.pushed = self.island.contribution()
        self.island.accepted = self.pushed
        if staleness:
            self.island.accepted = Pushed(**{**fields_of(self.pushed), "into": self.pushed.round + staleness})
        given_ = self.member.push(into=self.member.version + staleness)
        if CODECS[self.codec].carries_parameters:
            assert_close(self.island.global_flat - self.pushed.local, given_)

    def adopt(self, seed: int, *, ahead: int = 1) -> None:
        new_global, version = vector(seed), self.island.version + ahead
        self.island.adopt(new_global, version)
        self.member.adopt(wide(new_global), version)

    def push_stale(self, seed: int, behind: int) -> None:
        """A contribution that a later round takes, and the parameters that this round is on top of."""
        self.push(staleness=behind)
        assert self.island.accepted is not None
        new_global, version = vector(seed), self.island.version + behind
        self.island.carry(self.island.accepted, new_global, version)
        self.member.carry(wide(new_global), version)

    def check(self) -> None:
        island, member = self.island, self.member
        assert_close(flatten_module(island.module), member.local)
        assert_close(island.global_flat, member.base)
        assert (island.version, island.steps_since_sync, island.tokens_since_sync) == (
            member.version,
            member.steps,
            member.tokens,
        )
        if island.feedback is not None and member.owed.size:
            assert_close(island.feedback.residual, member.owed)


def fields_of(contribution: Pushed) -> dict[str, Any]:
    return {name: getattr(contribution, name) for name in Pushed.__dataclass_fields__}


events = st.one_of(
    st.tuples(st.just("train"), seeds, st.integers(1, 1000)),
    st.tuples(st.just("push")),
    st.tuples(st.just("adopt"), seeds),
    st.tuples(st.just("push_stale"), seeds, st.integers(1, 3)),
)


@given(sequence=st.lists(events, min_size=1, max_size=14), codec=st.sampled_from(sorted(CODECS)))
@settings(max_examples=60)
def test_islands_that_push_overlap_and_come_late_follow_the_reference(
    sequence: list[tuple[Any, ...]], codec: CodecName
) -> None:
    pair = Pair(codec)
    for name, *arguments in sequence:
        getattr(pair, name)(*arguments)
        pair.check()


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_result_that_is_applied_late_keeps_the_steps_since_the_push(delay: int) -> None:
    pair = Pair("fp32")
    pair.train(5, 10)
    pair.push()
    for number in range(delay):
        pair.train(6 + number, 10)
    pair.adopt(9)
    since = sum((wide(vector(6 + number, 0.1)) for number in range(delay)), np.zeros(SIZE))
    assert_close(flatten_module(pair.island.module), wide(vector(9)) + since)
    pair.check()


@given(progress=st.lists(seeds, min_size=1, max_size=8), codec=st.sampled_from(["bf16", "int8", "int4"]))
@settings(max_examples=20)
def test_what_rounds_got_and_what_is_owed_is_all_progress(progress: list[int], codec: CodecName) -> None:
    feedback = ErrorFeedback(CODECS[codec], SIZE)
    got, wanted, owed = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for seed in progress:
        gradient = vector(seed, 0.1)
        encoded = feedback.encode(new_vector(SIZE).copy_(gradient))
        feedback.settle(encoded)
        sent = wide(CODECS[codec].decode(encoded.payload, SIZE))
        owed = wide(gradient) + owed - sent
        got, wanted = got + sent, wanted + wide(gradient)
        assert_close(feedback.residual, owed)
    assert_close(feedback.residual, wanted - got)


def test_the_reference_itself_knows_nesterov() -> None:
    parameter = torch.nn.Parameter(vector(0).double())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer = Outer(parameters=wide(vector(0)), momentum=np.zeros(SIZE), lr=0.7, mu=0.9)
    for seed, staleness in itertools.product(range(3), (0, 2)):
        delta = reference.mean_pseudo_gradient(
            [Term(pseudo_gradient=wide(vector(seed)), tokens=3, staleness=staleness)], exponent=EXPONENT
        )
        parameter.grad = torch.from_numpy(delta)
        sgd.step()
        outer.step(delta)
        np.testing.assert_allclose(parameter.detach().numpy(), outer.parameters, rtol=1e-12)
