"""Every way that a scrape can end, against a real server on loopback."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sidecar.source import scrape
from sidecar.source.parse import PageParser, PageReader
from sidecar.source.remedies import remedy_of
from sidecar.source.scrape import Scraper
from sidecar.source.snapshot import ScrapeOutcome, ScrapeResult
from tests.sidecar.helpers import Upstream, capture, serving, without


def scrape_once(url: str, *, timeout_s: float = 5.0, **options: Any) -> ScrapeResult:
    async def once() -> ScrapeResult:
        async with httpx.AsyncClient(base_url=url + "/", trust_env=False) as client:
            return await Scraper(client, parser=PageParser("vllm:"), timeout_s=timeout_s, **options).scrape()

    return asyncio.run(once())


def test_a_good_page_becomes_a_snapshot() -> None:
    upstream = Upstream(capture("busy"))
    with serving(upstream):
        result = scrape_once(upstream.url)
    assert result.outcome is ScrapeOutcome.OK
    assert result.snapshot is not None
    assert result.snapshot.running == 2
    assert result.t_s == result.snapshot.t_s
    assert 0 < result.duration_s < 5


def make_status(upstream: Upstream) -> None:
    upstream.status = 503


def make_unauthorized(upstream: Upstream) -> None:
    upstream.status = 403


def make_redirect(upstream: Upstream) -> None:
    upstream.status = 307


def make_cut(upstream: Upstream) -> None:
    upstream.cut = True


def make_garbage(upstream: Upstream) -> None:
    upstream.page = "vllm:num_requests_running{ \x00\n"


def make_no_series(upstream: Upstream) -> None:
    upstream.page = without(upstream.page, "vllm:")


def make_html(upstream: Upstream) -> None:
    upstream.page = "<html>welcome</html>"


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (make_status, ScrapeOutcome.HTTP_ERROR),
        (make_unauthorized, ScrapeOutcome.UNAUTHORIZED),
        (make_redirect, ScrapeOutcome.REDIRECTED),
        (make_cut, ScrapeOutcome.BROKEN),
        (make_garbage, ScrapeOutcome.MALFORMED),
        (make_no_series, ScrapeOutcome.NO_SERIES),
        (make_html, ScrapeOutcome.NO_SERIES),
    ],
)
def test_outcome(change: Callable[[Upstream], None], outcome: ScrapeOutcome) -> None:
    upstream = Upstream(capture("busy"))
    change(upstream)
    with serving(upstream):
        result = scrape_once(upstream.url)
    assert result.outcome is outcome
    assert result.snapshot is None
    assert result.detail
    assert result.remedy
    assert result.explanation == f"{result.detail}; {result.remedy}"


def test_a_server_that_does_not_answer_is_a_timeout() -> None:
    upstream = Upstream(capture("busy"))
    upstream.hang.set()
    with serving(upstream):
        result = scrape_once(upstream.url, timeout_s=0.2)
        assert (result.outcome, "a longer --scrape-timeout-s" in result.explanation) == (ScrapeOutcome.TIMEOUT, True)
        assert scrape_once(upstream.url, timeout_s=0.2, timeout_option="--wait-s").remedy.endswith("longer --wait-s")
        upstream.released.set()


def test_a_closed_port_is_a_refusal() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # Bound and not listening: nobody else can take it, and it refuses.
        result = scrape_once(f"http://127.0.0.1:{probe.getsockname()[1]}")
    assert (result.outcome, "or correct host and port in --vllm" in result.remedy) == (ScrapeOutcome.REFUSED, True)


@pytest.mark.parametrize("is_socket", [False, True])
@pytest.mark.parametrize("outcome", [o for o in ScrapeOutcome if o not in (ScrapeOutcome.OK, ScrapeOutcome.NO_SERIES)])
def test_every_kind_of_failure_has_a_remedy(outcome: ScrapeOutcome, is_socket: bool) -> None:
    remedy = remedy_of(outcome, is_socket=is_socket)
    assert remedy
    assert "{" not in remedy


def test_a_failure_of_the_sidecar_itself_asks_for_a_report(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PageParser):
        def reader(self, content_type: str) -> PageReader:
            raise RuntimeError("a bug")

    async def once(url: str) -> ScrapeResult:
        async with httpx.AsyncClient(base_url=url + "/", trust_env=False) as client:
            return await Scraper(client, parser=Broken("vllm:"), timeout_s=5.0).scrape()

    upstream = Upstream(capture("busy"))
    with serving(upstream):
        result = asyncio.run(once(upstream.url))
    assert (result.outcome, "report it" in result.remedy) == (ScrapeOutcome.INTERNAL, True)
    assert "RuntimeError: a bug" in caplog.text


def test_an_endless_page_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MAX_PAGE_BYTES", 10_000)
    upstream = Upstream(capture("busy"))
    with serving(upstream):
        result = scrape_once(upstream.url)
    assert result.outcome is ScrapeOutcome.TOO_LARGE
    assert "over 10000" in result.detail


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("CERTIFICATE_VERIFY_FAILED", "set --vllm-ca "),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "wants a client certificate: set --vllm-cert "),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", "wants a client certificate: set --vllm-cert "),
        ("TLSV1_ALERT_UNKNOWN_CA", "does not take the client certificate: set --vllm-cert "),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "does not take the client certificate: set --vllm-cert "),
        ("WRONG_VERSION_NUMBER", "correct the scheme of --vllm"),
        ("", "correct the scheme of --vllm"),
    ],
)
def test_each_way_for_tls_to_fail_names_its_option(reason: str, said: str) -> None:
    broken = ssl.SSLError(1, f"[SSL: {reason}]")
    broken.reason = reason
    failed = httpx.ConnectError("")
    failed.__cause__ = broken
    failure = scrape.explain(failed, timeout_s=1.0)
    assert (failure.outcome, said in failure.remedy) == (ScrapeOutcome.TLS, True)
