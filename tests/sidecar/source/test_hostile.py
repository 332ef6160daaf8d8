"""Whatever a server sends, a scrape ends in time and within bounds, with a reason, and raises nothing."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from typing import Any

import httpx
import pytest

from sidecar.config import SidecarSettings
from sidecar.source import scrape as scrape_module
from sidecar.source.parse import MAX_LINE_BYTES, MAX_SAMPLES, PageParser
from sidecar.source.scrape import MAX_PAGE_BYTES, Scraper
from sidecar.source.snapshot import ScrapeOutcome, ScrapeResult
from sidecar.source.transport import open_client
from tests.sidecar.helpers import TEXT, capture
from tests.sidecar.raw_server import Answer, raw_server, response, saying

OUT = ScrapeOutcome
BUSY = capture("busy").encode()
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: {TEXT}\r\n".encode()
RUNNING = b'vllm:num_requests_running{engine="0"} 1.0\n'


def scrape(answer: Answer, *, timeout_s: float = 10.0) -> ScrapeResult:
    async def main() -> ScrapeResult:
        async with raw_server(answer) as port:
            settings = SidecarSettings(
                vllm=f"http://127.0.0.1:{port}", scrape_timeout_s=timeout_s, scrape_interval_s=10
            )
            async with open_client(settings, True, timeout_s=timeout_s) as client:
                return await Scraper(client, parser=PageParser("vllm:"), timeout_s=timeout_s).scrape()

    return asyncio.run(main())


def repeating(chunk: bytes, *, times: int | None = None, chunked: bool = False, pause_s: float = 0.0) -> Answer:
    """A body of ``chunk`` over and over, for ever when ``times`` is left out."""

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + (b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Connection: close\r\n\r\n"))
        framed = b"%x\r\n%s\r\n" % (len(chunk), chunk) if chunked else chunk
        sent = 0
        while times is None or sent < times:
            writer.write(framed)
            await writer.drain()
            await asyncio.sleep(pause_s)
            sent += 1

    return answer


async def hang(_: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def hang_in_the_body(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 100000\r\n\r\n" + RUNNING)
    await writer.drain()
    await asyncio.sleep(3600)


async def reset(_: str, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def reset_in_the_body(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 100000\r\n\r\n" + RUNNING)
    await writer.drain()
    writer.transport.abort()


async def informing_for_ever(_: str, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()


def with_length(length: str, body: bytes = BUSY) -> Answer:
    return saying(HEAD + f"Content-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body)


LIES: list[tuple[str, Answer, set[ScrapeOutcome]]] = [
    ("announces more than it sends", with_length(str(len(BUSY) + 1)), {OUT.BROKEN}),
    ("announces less than it sends", with_length(str(len(BUSY) // 2)), {OUT.MALFORMED}),
    ("announces a terabyte", with_length("1000000000000"), {OUT.TOO_LARGE}),
    ("announces a number without end", with_length("9" * 5000), {OUT.TOO_LARGE, OUT.BROKEN}),
    ("announces what is no number", with_length("-1"), {OUT.BROKEN}),
    ("announces two lengths", with_length("5\r\nContent-Length: 7"), {OUT.BROKEN}),
    ("resets", reset, {OUT.BROKEN}),
    ("resets in the body", reset_in_the_body, {OUT.BROKEN}),
    ("speaks no HTTP", saying(b"220 ftp.example ready\r\n"), {OUT.BROKEN}),
    ("sends a header without end", saying(HEAD + b"X: " + b"x" * (1 << 20)), {OUT.BROKEN}),
    ("sends nothing", saying(b""), {OUT.BROKEN}),
    ("sends an empty page", saying(response(b"")), {OUT.NO_SERIES}),
    ("sends bytes", saying(response(bytes(range(256)) * 4096)), {OUT.NO_SERIES}),
    ("sends bytes in a needed line", saying(response(RUNNING[:-5] + b"\x00\xff\xfe\n")), {OUT.MALFORMED}),
    ("sends UTF-16", saying(response(capture("busy").encode("utf-16"))), {OUT.NO_SERIES}),
    ("compresses unasked", saying(response(gzip.compress(BUSY), Content_Encoding="gzip")), {OUT.MALFORMED}),
    ("bombs", saying(response(gzip.compress(bytes(100 << 20)), Content_Encoding="gzip")), {OUT.MALFORMED}),
    ("encodes unknown", saying(response(BUSY, Content_Encoding="x" * 500)), {OUT.MALFORMED}),
    ("answers 204", saying(response(b"", status="204 No Content")), {OUT.HTTP_ERROR}),
    ("answers 503 with a page", saying(response(BUSY, status="503 Busy")), {OUT.HTTP_ERROR}),
    ("answers a part", saying(response(BUSY, status="206 Partial Content")), {OUT.HTTP_ERROR}),
    ("cuts the last line", saying(response(BUSY[: BUSY.rindex(b" ") + 2])), {OUT.MALFORMED}),
    (
        "sends a line of a megabyte",
        saying(response(b"vllm:num_requests_running{a=" + b"x" * (1 << 20))),
        {OUT.TOO_LARGE},
    ),
    (
        "sends a hundred thousand engines",
        saying(response(b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % i for i in range(100_000)))),
        {OUT.TOO_LARGE},
    ),
]


@pytest.mark.parametrize(("answer", "outcomes"), [row[1:] for row in LIES], ids=[row[0] for row in LIES])
def test_a_server_that(answer: Answer, outcomes: set[ScrapeOutcome]) -> None:
    result = scrape(answer)
    assert result.outcome in outcomes, result
    assert result.snapshot is None
    assert 0 < len(result.detail) <= 300


ENDLESS: list[tuple[str, Answer]] = [
    ("hangs", hang),
    ("hangs in the body", hang_in_the_body),
    ("drips", repeating(b"#", chunked=True, pause_s=0.01)),
    ("drips a needed line", repeating(b"vllm:num_requests_running{", pause_s=0.01)),
    ("informs for ever", informing_for_ever),
]


@pytest.mark.parametrize("answer", [row[1] for row in ENDLESS], ids=[row[0] for row in ENDLESS])
def test_what_never_ends_is_a_time_out(answer: Answer) -> None:
    assert scrape(answer, timeout_s=0.3).outcome is OUT.TIMEOUT


HUGE: list[tuple[str, Answer]] = [
    ("100 MB", repeating((b"# " + b"c" * 997 + b"\n") * 100, times=1000)),
    ("100 MB in chunks", repeating((b'other_series{x="' + b"x" * 900 + b'"} 1.0\n') * 100, times=1000, chunked=True)),
    ("one line without end", repeating(b"x" * 65536)),
    ("needed lines without end", repeating(RUNNING * 1000, chunked=True)),
]


@pytest.mark.parametrize("answer", [row[1] for row in HUGE], ids=[row[0] for row in HUGE])
def test_a_huge_page_is_given_up_in_bounded_memory(answer: Answer) -> None:
    tracemalloc.start()
    try:
        result = scrape(answer, timeout_s=60.0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.outcome is OUT.TOO_LARGE
    # What counts as a page at all would be 16 MiB; the server of this test and its buffers are in the peak too.
    assert peak_bytes < MAX_PAGE_BYTES


def test_a_hundred_thousand_other_series_cost_nothing() -> None:
    others = b"".join(b'vllm:other_total{engine="%d",label="%s"} 1.0\n' % (i, b"x" * 80) for i in range(100_000))
    result = scrape(saying(response(others + BUSY)))
    assert result.snapshot is not None
    assert (result.snapshot.running, result.snapshot.num_engines) == (2, 1)


def test_a_comment_of_a_megabyte_is_skipped() -> None:
    result = scrape(saying(response(b"# HELP vllm:x " + b"x" * (1 << 20) + b"\n" + BUSY)))
    assert result.snapshot is not None
    assert result.snapshot.running == 2


def test_labels_of_many_kilobytes_are_read() -> None:
    page = BUSY.replace(b'model_name="tiny"', b'model_name="%s"' % (b"m" * (MAX_LINE_BYTES // 2)))
    result = scrape(saying(response(page)))
    assert result.snapshot is not None
    assert result.snapshot.running == 2


def test_a_page_of_many_engines_is_read() -> None:
    lines = [line for line in BUSY.splitlines(keepends=True) if line.startswith(b"vllm:")]
    pages = [b"".join(line.replace(b'engine="0"', b'engine="%d"' % i) for line in lines) for i in range(128)]
    assert MAX_SAMPLES > 128 * 90
    result = scrape(saying(response(b"".join(pages))))
    assert result.snapshot is not None
    assert (result.snapshot.running, result.snapshot.num_engines) == (256, 128)


def test_a_wrong_charset_does_not_matter() -> None:
    result = scrape(saying(response(BUSY, content_type="text/plain; charset=utf-32")))
    assert result.outcome is OUT.OK


@pytest.mark.parametrize(
    ("status", "accepts"), [("200 OK", True), ("503 Busy", False), ("404 Not Found", None), ("307 Elsewhere", None)]
)
def test_health_tells_whether_the_server_takes_requests(status: str, accepts: bool | None) -> None:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        await saying(response(BUSY) if "/metrics " in head else response(b"", status=status))(head, writer)

    result = scrape(answer)
    assert (result.outcome, result.accepts) == (OUT.OK, accepts)


def test_health_that_hangs_or_floods_spoils_no_page() -> None:
    for health in (hang, repeating(b"x" * 65536), reset):

        async def answer(head: str, writer: asyncio.StreamWriter, health: Answer = health) -> None:
            await (saying(response(BUSY)) if "/metrics " in head else health)(head, writer)

        result = scrape(answer, timeout_s=1.0)
        assert result.outcome is OUT.OK
        assert result.accepts in {None, True}


def test_health_is_asked_seldom_while_it_is_good_and_every_time_while_it_is_not() -> None:
    paths: list[str] = []
    health = ["200 OK"]

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        paths.append(head.split(" ")[1])
        await saying(response(BUSY) if "/metrics " in head else response(b"", status=health[0]))(head, writer)

    async def main(first: str) -> None:
        health[0] = first
        paths.clear()
        async with raw_server(answer) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/") as client:
            scraper = Scraper(client, parser=PageParser("vllm:"), timeout_s=10.0)
            for _ in range(3):
                await scraper.scrape()

    asyncio.run(main("200 OK"))
    assert paths == ["/metrics", "/health", "/metrics", "/metrics"]
    asyncio.run(main("503 Service Unavailable"))
    assert paths == ["/metrics", "/health"] * 3


def test_a_failure_of_the_parser_is_counted_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(PageParser):
        def reader(self, content_type: str) -> Any:
            raise RecursionError

    monkeypatch.setattr(f"{__name__}.PageParser", Broken)
    assert scrape(saying(response(BUSY))).outcome is OUT.INTERNAL


@pytest.mark.parametrize("now_s", [-1e9, 0.0, 1e12])
def test_a_wall_clock_that_jumps_changes_no_interval(monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
    class Clock:
        monotonic = staticmethod(time.monotonic)
        time = staticmethod(lambda: now_s)

    monkeypatch.setattr(scrape_module, "time", Clock)
    result = scrape(saying(response(BUSY)))
    assert result.t_s == max(now_s, 0.0)
    assert 0 <= result.duration_s < 10


def test_a_stop_of_the_sidecar_goes_through_a_scrape() -> None:
    async def main() -> None:
        async with raw_server(hang) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/") as client:
            task = asyncio.create_task(Scraper(client, parser=PageParser("vllm:"), timeout_s=60.0).scrape())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
