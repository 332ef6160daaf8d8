"""Error feedback: nothing is lost for good, only late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import CODECS, Codec
from diloco.feedback import ErrorFeedback
from service.errors import InputError

SIZE = 300
lossy = pytest.mark.parametrize("codec", [CODECS["bf16"], CODECS["int8"], CODECS["int4"]], ids=["bf16", "int8", "int4"])


def vector(seed: int) -> Tensor:
    return 1e-3 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def merged(feedback: ErrorFeedback, codec: Codec, pseudo_gradient: Tensor) -> Tensor:
    """What a round gets."""
    encoded = feedback.encode(pseudo_gradient.clone())
    feedback.settle(encoded)
    return codec.decode(encoded.payload, SIZE)


@lossy
def test_the_mean_of_a_constant_vector_converges_to_it(codec: Codec) -> None:
    constant = vector(0)
    feedback = ErrorFeedback(codec, SIZE)
    total, distances = np.zeros(SIZE), []
    for number in range(1, 101):
        total += merged(feedback, codec, constant).numpy()
        distances.append(float(np.abs(total / number - constant.numpy()).max()))
    assert distances[99] <= distances[0] / 20
    assert distances[99] < 1e-4


@lossy
@given(seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_what_rounds_got_and_what_is_owed_is_the_sum_of_all(codec: Codec, seeds: list[int]) -> None:
    feedback = ErrorFeedback(codec, SIZE)
    got = sum(merged(feedback, codec, vector(seed)).double() for seed in seeds)
    given_in_all = sum(vector(seed).double() for seed in seeds)
    torch.testing.assert_close(got + feedback.residual.double(), given_in_all, rtol=0, atol=1e-8)
    assert feedback.norm == pytest.approx(float(feedback.residual.norm()), rel=1e-6)


@lossy
def test_what_is_owed_changes_only_when_a_round_has_got_the_contribution(codec: Codec) -> None:
    feedback = ErrorFeedback(codec, SIZE)
    merged(feedback, codec, vector(1))
    owed = feedback.residual.clone()
    replaced = feedback.encode(vector(2))
    newer = feedback.encode(vector(2) + vector(3))
    assert torch.equal(feedback.residual, owed)
    assert torch.equal(replaced.payload, feedback.encode(vector(2)).payload)
    feedback.settle(newer)
    decoded = codec.decode(newer.payload, SIZE)
    torch.testing.assert_close(decoded + feedback.residual, owed + vector(2) + vector(3), rtol=0, atol=1e-9)


def test_to_forget_is_to_owe_nothing() -> None:
    feedback = ErrorFeedback(CODECS["int4"], SIZE)
    merged(feedback, CODECS["int4"], vector(1))
    assert feedback.norm > 0
    feedback.forget()
    assert feedback.norm == 0
    assert not feedback.residual.any()


def test_what_cannot_be_encoded_leaves_what_is_owed_alone() -> None:
    feedback = ErrorFeedback(CODECS["int4"], SIZE)
    merged(feedback, CODECS["int4"], vector(1))
    owed = feedback.residual.clone()
    with pytest.raises(InputError, match="not finite"):
        feedback.encode(torch.full((SIZE,), torch.nan))
    assert torch.equal(feedback.residual, owed)
