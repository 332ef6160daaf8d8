import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.scaling import TOKEN_IDS, LengthLimits, length_limits, plan_requests
from replay.traces import Request, Trace
from service.errors import InputError

LIMITS = LengthLimits(max_prompt_tokens=100, max_output_tokens=10)


def trace_of(lengths: list[tuple[int, int]]) -> Trace:
    requests = tuple(Request(float(index), *pair) for index, pair in enumerate(lengths))
    return Trace("t", "plain", requests, float(len(lengths)))


def test_lengths_within_the_limits_are_kept() -> None:
    planned, scaling = plan_requests(trace_of([(5, 3), (100, 10), (1, 1)]), limits=LIMITS, num_servers=1, seed=0)
    assert [(len(request.prompt_token_ids), request.max_tokens) for request in planned] == [(5, 3), (100, 10), (1, 1)]
    assert (scaling.prompt_factor, scaling.output_factor) == (1, 1)
    assert (scaling.prompt_clipped_frac, scaling.output_clipped_frac) == (0, 0)


def test_the_95th_percentile_lands_on_the_limit_and_the_tail_is_clipped() -> None:
    lengths = [(index * 10, index) for index in range(1, 101)]
    planned, scaling = plan_requests(trace_of(lengths), limits=LIMITS, num_servers=1, seed=0)
    assert scaling.prompt_factor == pytest.approx(100 / 950.5)
    assert scaling.prompt_clipped_frac == pytest.approx(0.05)
    assert max(len(request.prompt_token_ids) for request in planned) == 100
    assert scaling.prompt_tokens_mean == pytest.approx(sum(len(r.prompt_token_ids) for r in planned) / 100)
    assert scaling.output_tokens_mean == pytest.approx(sum(request.max_tokens for request in planned) / 100)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 50),
    st.integers(1, 4),
)
def test_every_request_fits_the_server(
    lengths: list[tuple[int, int]], max_prompt: int, max_output: int, num_servers: int
) -> None:
    limits = LengthLimits(max_prompt, max_output)
    planned, scaling = plan_requests(trace_of(lengths), limits=limits, num_servers=num_servers, seed=1)
    for request in planned:
        assert 1 <= len(request.prompt_token_ids) <= max_prompt
        assert 1 <= request.max_tokens <= max_output
        assert set(request.prompt_token_ids) <= set(TOKEN_IDS)
    assert [request.server_index for request in planned] == [index % num_servers for index in range(len(planned))]
    assert 0 < scaling.prompt_factor <= 1
    assert scaling.prompt_clipped_frac <= 1


def test_prompts_differ_within_a_run_and_between_seeds_and_repeat_for_a_seed() -> None:
    trace = trace_of([(64, 4)] * 50)
    first, _ = plan_requests(trace, limits=LIMITS, num_servers=2, seed=1)
    again, _ = plan_requests(trace, limits=LIMITS, num_servers=2, seed=1)
    other, _ = plan_requests(trace, limits=LIMITS, num_servers=2, seed=2)
    assert first == again
    # 16 tokens are the smallest block that a prefix cache shares.
    heads = [request.prompt_token_ids[:16] for request in (*first, *other)]
    assert len(set(heads)) == 100


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [(None, None, (768, 256)), (100, None, (100, 924)), (None, 24, (1000, 24)), (900, 124, (900, 124))],
)
def test_limits_share_the_context(prompt: int | None, output: int | None, expected: tuple[int, int]) -> None:
    limits = length_limits(1024, max_prompt_tokens=prompt, max_output_tokens=output)
    assert (limits.max_prompt_tokens, limits.max_output_tokens) == expected


@pytest.mark.parametrize(("prompt", "output"), [(0, None), (1024, None), (None, -1), (1000, 25), (None, 2000)])
def test_limits_beyond_the_context_are_refused(prompt: int | None, output: int | None) -> None:
    with pytest.raises(InputError) as caught:
        length_limits(1024, max_prompt_tokens=prompt, max_output_tokens=output)
    assert caught.value.field is not None
    assert "tokens" in caught.value.field
    assert "1024" in str(caught.value)
