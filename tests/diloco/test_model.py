from __future__ import annotations

import pytest
import torch

from diloco.model import ModelSize, build_model, count_parameters, next_byte_loss

TINY = ModelSize(num_layers=2, num_heads=2, width=16, context=8)


def test_default_size_is_about_three_million_parameters() -> None:
    assert 3_000_000 < count_parameters(build_model(ModelSize(), seed=0)) < 3_500_000


def test_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    first = build_model(TINY, seed=3)
    torch.rand(7)
    second = build_model(TINY, seed=3)
    other = build_model(TINY, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.token_embedding.weight, other.token_embedding.weight)


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(0))
    assert next_byte_loss(build_model(TINY, seed=0), tokens).item() == pytest.approx(5.545, abs=0.05)


def test_norms_start_at_one_and_biases_at_zero() -> None:
    model = build_model(TINY, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == (1.0 if name.endswith("norm.weight") else 0.0)), name


def test_a_later_byte_does_not_change_earlier_predictions() -> None:
    model = build_model(TINY, seed=0)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, -1] = 200
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_embedding_and_output_are_one_parameter() -> None:
    names = [name for name, p in build_model(TINY, seed=0).named_parameters() if p.shape[0] == 256]
    assert names == ["token_embedding.weight"]


@pytest.mark.parametrize("bad", [{"num_layers": 0}, {"width": 30, "num_heads": 4}, {"context": -1}])
def test_a_size_that_cannot_be_built_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ModelSize(**bad)
