import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from replay.loadgen import PlannedRequest, RequestResult, Status, discover, run_load
from service.errors import InputError, UnavailableError

Serve = Callable[..., Any]


def planned(arrival_s: float = 0.0, *, max_tokens: int = 4, server_index: int = 0) -> PlannedRequest:
    return PlannedRequest(arrival_s, server_index, (5, 6, 7), max_tokens)


async def load(url: str, *requests: PlannedRequest, timeout_s: float = 5.0, **options: Any) -> list[RequestResult]:
    return await run_load(requests, [url], model="tiny", timeout_s=timeout_s, **options)


def test_a_request_asks_for_exactly_its_tokens_as_a_stream(completion_server: Serve) -> None:
    async def body() -> None:
        async with completion_server() as fake:
            (result,) = await load(fake.url + "/v1/", planned(max_tokens=7), api_key="secret")
            assert (result.status, result.http_status, result.detail) == (Status.OK, 200, "")
            assert (result.prompt_tokens, result.output_tokens, len(result.itl_s)) == (3, 7, 6)
            assert fake.bodies == [
                {
                    "model": "tiny",
                    "prompt": [5, 6, 7],
                    "max_tokens": 7,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "temperature": 0,
                    "ignore_eos": True,
                }
            ]
            assert fake.heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
            assert b"Authorization: Bearer secret\r\n" in fake.heads[0]

    asyncio.run(body())


def test_arrivals_do_not_wait_for_answers(completion_server: Serve) -> None:
    async def body() -> None:
        hold = asyncio.Event()
        async with completion_server(hold=hold) as fake:
            requests = [planned(0.01 * index) for index in range(30)]
            running = asyncio.create_task(load(fake.url, *requests))
            # All of them are there although not one has been answered.
            await fake.until(lambda: fake.arrived[4] == 30)
            hold.set()
            results = await running
        assert [result.index for result in results] == list(range(30))
        assert all(result.ok for result in results)
        assert fake.num_connections == 30

    asyncio.run(body())


def test_latencies_are_those_of_the_tokens(completion_server: Serve, script: type[Any]) -> None:
    async def body() -> None:
        async with completion_server(scripts={3: script(first_delay_s=0.1, gap_s=0.05)}) as fake:
            before_s = time.time()
            (result,) = await load(fake.url, planned(0.02, max_tokens=3))
        assert result.ttft_s is not None
        assert result.e2e_s is not None
        # Lower bounds only: a busy machine may add to any of them.
        assert result.ttft_s >= 0.1
        assert min(result.itl_s) >= 0.04
        assert result.e2e_s == pytest.approx(result.ttft_s + sum(result.itl_s))
        assert result.sent_s >= 0.02
        assert result.ended_s == pytest.approx(result.sent_s + result.e2e_s)
        assert result.ended_unix_s - result.sent_unix_s == pytest.approx(result.e2e_s)
        assert result.sent_unix_s == pytest.approx(before_s + result.sent_s, abs=0.05)

    asyncio.run(body())


def test_tokens_that_arrive_together_have_no_gap(completion_server: Serve, script: type[Any]) -> None:
    async def body() -> None:
        async with completion_server(scripts={4: script(together=True)}) as fake:
            (result,) = await load(fake.url, planned())
        assert result.itl_s == (0, 0, 0)

    asyncio.run(body())


def test_lateness_is_reported(completion_server: Serve) -> None:
    async def body() -> None:
        async with completion_server() as fake:
            late, punctual = await load(
                fake.url, planned(0.0), planned(1.05), start_at_monotonic_s=time.monotonic() - 1.0
            )
        assert late.lateness_s >= 1.0
        assert 0 <= punctual.lateness_s < 1.0

    asyncio.run(body())


def test_a_start_in_the_future_is_waited_for(completion_server: Serve) -> None:
    async def body() -> None:
        async with completion_server() as fake:
            start_s = time.monotonic() + 0.1
            (result,) = await load(fake.url, planned(), start_at_monotonic_s=start_s)
        assert result.sent_s >= 0

    asyncio.run(body())


@pytest.mark.parametrize(
    ("options", "status", "detail", "num_gaps"),
    [
        ({"status": 503}, Status.HTTP_ERROR, "HTTP 503: scripted 503", 0),
        ({"error_after": 2}, Status.HTTP_ERROR, "engine died", 1),
        ({"cut_after": 3}, Status.DISCONNECTED, "ended before the answer", 2),
        ({"cut_after": 0}, Status.DISCONNECTED, "ended before the answer", 0),
        ({"hang_after": 0}, Status.TIMEOUT, "1 s", 0),
        ({"hang_after": 2}, Status.TIMEOUT, "1 s", 1),
        ({"raw": b"SSH-2.0-OpenSSH_9.2\r\n\r\n"}, Status.DISCONNECTED, "no HTTP/1.1 answer", 0),
        ({"raw": b""}, Status.DISCONNECTED, "ended before the answer", 0),
        ({"raw": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"}, Status.HTTP_ERROR, "without a token", 0),
        ({"without_done": True}, Status.DISCONNECTED, "without [DONE]", 3),
    ],
)
def test_each_failure_has_its_status_and_the_next_request_is_served(
    completion_server: Serve,
    script: type[Any],
    options: dict[str, Any],
    status: Status,
    detail: str,
    num_gaps: int,
) -> None:
    async def body() -> None:
        async with completion_server(scripts={4: script(**options)}) as fake:
            failed, served = await load(fake.url, planned(max_tokens=4), planned(0.05, max_tokens=5), timeout_s=1)
        assert failed.status is status
        assert detail in failed.detail
        assert failed.e2e_s is None
        assert len(failed.itl_s) == num_gaps
        assert failed.ended_s >= failed.sent_s
        assert served.status is Status.OK
        assert fake.arrived == {4: 1, 5: 1}

    asyncio.run(body())


def test_a_server_that_is_down_refuses_and_the_other_serves_on(completion_server: Serve) -> None:
    async def body() -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            down = f"http://127.0.0.1:{reserved.getsockname()[1]}"
            async with completion_server() as fake:
                results = await run_load(
                    [planned(server_index=index % 2) for index in range(4)],
                    [down, fake.url],
                    model="tiny",
                    timeout_s=5,
                )
        assert [result.status for result in results] == [Status.REFUSED, Status.OK] * 2
        assert down in results[0].detail

    asyncio.run(body())


def test_a_timed_out_request_is_given_up_towards_the_server(completion_server: Serve, script: type[Any]) -> None:
    async def body() -> None:
        async with completion_server(scripts={4: script(hang_after=1)}) as fake:
            await load(fake.url, planned(), timeout_s=0.1)
            await fake.until(lambda: fake.num_closed == 1)

    asyncio.run(body())


def test_connections_are_used_again(completion_server: Serve, script: type[Any]) -> None:
    async def body() -> None:
        async with completion_server() as fake:
            answered = asyncio.Event()
            first = asyncio.create_task(
                load(fake.url, planned(0), planned(0.3), on_result=lambda _: answered.set(), timeout_s=5)
            )
            async with asyncio.timeout(5):
                await answered.wait()
            results = await first
            assert all(result.ok for result in results)
            assert fake.num_connections == 1

    asyncio.run(body())


@pytest.mark.parametrize("options", [{"close_after": True}, {"drop_second": True}])
def test_a_connection_that_the_server_closed_while_idle_costs_no_request(
    completion_server: Serve, script: type[Any], options: dict[str, bool]
) -> None:
    async def body() -> None:
        async with completion_server(scripts={4: script(**options)}) as fake:
            results = await load(fake.url, planned(0), planned(0.2))
            assert [result.status for result in results] == [Status.OK, Status.OK]
            assert fake.num_connections == 2

    asyncio.run(body())


def test_a_missing_usage_leaves_the_token_count_unknown(completion_server: Serve, script: type[Any]) -> None:
    async def body() -> None:
        async with completion_server(scripts={4: script(without_usage=True)}) as fake:
            (result,) = await load(fake.url, planned())
        assert result.ok
        assert result.output_tokens is None

    asyncio.run(body())


def test_stopping_cancels_what_is_in_flight_and_sends_nothing_more(completion_server: Serve) -> None:
    async def body() -> None:
        stop = asyncio.Event()
        async with completion_server(hold=asyncio.Event()) as fake:
            running = asyncio.create_task(load(fake.url, planned(0), planned(0), planned(60), exit_event=stop))
            await fake.until(lambda: fake.arrived[4] == 2)
            stop.set()
            async with asyncio.timeout(5):
                results = await running
            fake.hold.set()
        assert [(result.index, result.status) for result in results] == [(0, Status.CANCELLED), (1, Status.CANCELLED)]

    asyncio.run(body())


def test_cancelling_the_load_closes_its_connections(completion_server: Serve) -> None:
    async def body() -> None:
        async with completion_server(hold=asyncio.Event()) as fake:
            running = asyncio.create_task(load(fake.url, planned()))
            await fake.until(lambda: fake.arrived[4] == 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            fake.hold.set()
            await fake.until(lambda: fake.num_closed == 1)

    asyncio.run(body())


def test_results_are_told_as_they_come_and_returned_in_the_given_order(completion_server: Serve) -> None:
    async def body() -> None:
        seen: list[int] = []
        async with completion_server() as fake:
            results = await load(fake.url, planned(0.2), planned(0), on_result=lambda result: seen.append(result.index))
        assert seen == [1, 0]
        assert [result.index for result in results] == [0, 1]

    asyncio.run(body())


def test_an_empty_load_ends_at_once() -> None:
    assert asyncio.run(load("http://127.0.0.1:1")) == []


def test_discovery_tells_model_and_context(completion_server: Serve) -> None:
    async def body() -> None:
        async with completion_server() as fake:
            for url in (fake.url, fake.url + "/", fake.url + "/v1"):
                info = await discover(url, model="tiny")
                assert (info.url, info.model, info.max_model_len) == (fake.url, "tiny", 1024)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("models", "model", "error", "field", "needle"),
    [
        ((200, b'{"data": [{"id": "tiny", "max_model_len": 9}]}'), "big", InputError, "--model", "it serves tiny"),
        ((200, b"<html>"), None, InputError, "--server", "not a vLLM server"),
        ((200, b'{"data": []}'), None, InputError, "--server", "not a vLLM server"),
        ((200, b'{"data": [{"id": "tiny"}]}'), None, InputError, "--server", "max_model_len"),
        ((404, b"{}"), None, InputError, "--server", "HTTP 404"),
        ((401, b'{"error": "Unauthorized"}'), None, InputError, "--api-key", "API key"),
        ((503, b'{"error": "loading"}'), None, UnavailableError, "--server", "loading"),
    ],
)
def test_discovery_says_what_is_wrong_with_a_server(
    completion_server: Serve,
    models: tuple[int, bytes],
    model: str | None,
    error: type[InputError | UnavailableError],
    field: str,
    needle: str,
) -> None:
    async def body() -> None:
        async with completion_server(models=models) as fake:
            with pytest.raises(error, match=needle) as caught:
                await discover(fake.url, model=model)
            assert caught.value.field == field
            assert caught.value.remedy

    asyncio.run(body())


def test_discovery_of_nobody_names_the_option() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(UnavailableError, match="does not answer") as caught:
            asyncio.run(discover(url))
    assert caught.value.field == "--server"


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_a_malformed_url_is_refused_before_any_request(url: str) -> None:
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:8000") as caught:
        asyncio.run(discover(url))
    assert caught.value.field == "--server"
