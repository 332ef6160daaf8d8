"""The ways to a server: TLS, client certificates, tokens and Unix sockets, each against a real server on this host."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from service.errors import ConfigError
from sidecar.config import SidecarSettings
from sidecar.source.parse import PageParser
from sidecar.source.scrape import Scraper
from sidecar.source.snapshot import ScrapeOutcome, ScrapeResult
from sidecar.source.transport import open_client, tls_context
from tests.sidecar.authority import Authority
from tests.sidecar.helpers import Upstream, capture, serving
from tests.sidecar.raw_server import Answer, Heads, raw_server, redirecting, response, saying

PAGE = response(capture("busy").encode())


async def scrape(vllm: str, *, times: int = 1, **values: Any) -> ScrapeResult:
    settings = SidecarSettings(vllm=vllm, scrape_timeout_s=5.0, **values)
    async with open_client(settings, tls_context(settings), timeout_s=settings.scrape_timeout_s) as client:
        scraper = Scraper(
            client,
            parser=PageParser("vllm:"),
            timeout_s=settings.scrape_timeout_s,
            is_socket=settings.vllm_socket is not None,
        )
        for _ in range(times):
            result = await scraper.scrape()
        return result


def scrape_tls(context: ssl.SSLContext, answer: Answer | None = None, /, **values: Any) -> ScrapeResult:
    async def main() -> ScrapeResult:
        async with raw_server(answer or saying(PAGE), context=context) as port:
            return await scrape(f"https://127.0.0.1:{port}", **values)

    return asyncio.run(main())


@pytest.mark.parametrize("setting", ["vllm_ca", "tls_ca"])
def test_a_server_with_a_certificate_of_an_own_ca_is_scraped(authority: Authority, setting: str) -> None:
    assert scrape_tls(authority.context(), **{setting: authority.ca}).outcome is ScrapeOutcome.OK


def test_the_ca_of_the_server_goes_before_that_of_the_fleet(authority: Authority, stranger: Authority) -> None:
    assert scrape_tls(authority.context(), vllm_ca=authority.ca, tls_ca=stranger.ca).outcome is ScrapeOutcome.OK


@pytest.mark.parametrize("values", [{}, {"vllm_ca": "stranger"}, {"vllm_ca": "authority", "host": "10.0.0.1"}])
def test_a_certificate_that_does_not_fit_is_told_from_a_server_that_is_down(
    authority: Authority, stranger: Authority, values: dict[str, str]
) -> None:
    ca = {"authority": authority.ca, "stranger": stranger.ca}.get(values.get("vllm_ca", ""))
    result = scrape_tls(authority.context(host=values.get("host", "127.0.0.1")), vllm_ca=ca)
    assert result.outcome is ScrapeOutcome.TLS
    assert "--vllm-ca" in result.remedy


def test_a_client_certificate_is_shown_to_a_server_that_asks(authority: Authority) -> None:
    context = authority.context(ask_clients=True)
    shown = {"vllm_ca": authority.ca, "vllm_cert": authority.cert, "vllm_key": authority.key}
    assert scrape_tls(context, **shown).outcome is ScrapeOutcome.OK
    fleet = {"tls_ca": authority.ca, "tls_cert": authority.cert, "tls_key": authority.key}
    assert scrape_tls(context, **fleet).outcome is ScrapeOutcome.OK


def test_a_server_that_asks_for_a_certificate_refuses_a_stranger(authority: Authority, stranger: Authority) -> None:
    context = authority.context(ask_clients=True)
    assert scrape_tls(context, vllm_ca=authority.ca).outcome is ScrapeOutcome.TLS
    other = {"vllm_ca": authority.ca, "vllm_cert": stranger.cert, "vllm_key": stranger.key}
    assert scrape_tls(context, **other).outcome is ScrapeOutcome.TLS


def test_a_server_that_drops_the_connection_after_the_handshake_may_want_a_certificate(authority: Authority) -> None:
    result = scrape_tls(authority.context(), saying(b""), vllm_ca=authority.ca)
    assert result.outcome is ScrapeOutcome.BROKEN
    assert "--vllm-cert" in result.remedy


def test_a_server_without_tls_behind_an_https_url_is_a_tls_failure() -> None:
    upstream = Upstream(capture("busy"))
    with serving(upstream):
        result = asyncio.run(scrape(upstream.url.replace("http:", "https:")))
    assert result.outcome is ScrapeOutcome.TLS
    assert "scheme of --vllm" in result.remedy


@pytest.mark.parametrize(
    ("ca", "cert", "key", "field"),
    [("key", None, None, "vllm_ca"), ("ca", "cert", "other", "vllm_cert"), ("ca", "key", "cert", "vllm_cert")],
)
def test_files_that_do_not_work_are_named_at_the_start(
    authority: Authority, stranger: Authority, ca: str, cert: str | None, key: str | None, field: str
) -> None:
    files = {"ca": authority.ca, "cert": authority.cert, "key": authority.key, "other": stranger.key}
    settings = SidecarSettings(
        vllm="https://host", vllm_ca=files[ca], vllm_cert=cert and files[cert], vllm_key=key and files[key]
    )
    with pytest.raises(ConfigError) as refused:
        tls_context(settings)
    assert refused.value.field == field


def scrape_heads(heads: Heads, *, base: str = "", **values: Any) -> ScrapeResult:
    async def main() -> ScrapeResult:
        async with raw_server(heads) as port:
            return await scrape(f"http://127.0.0.1:{port}{base}", **values)

    return asyncio.run(main())


def test_a_token_is_sent_to_the_server_and_the_fleets_is_not() -> None:
    heads = Heads(PAGE)
    result = scrape_heads(heads, vllm_token=SecretStr("of-the-server"), token=SecretStr("of-the-fleet"))
    assert result.outcome is ScrapeOutcome.OK
    assert all("authorization: bearer of-the-server\r\n" in head.lower() for head in heads.heads)
    assert "of-the-fleet" not in "".join(heads.heads)


def test_a_token_file_is_read_at_every_scrape(tmp_path: Path) -> None:
    path, heads = tmp_path / "token", Heads(PAGE)
    path.write_text("first\n")
    settings = SidecarSettings(vllm="http://127.0.0.1:9", vllm_token_file=path)

    async def main() -> list[ScrapeOutcome]:
        async with raw_server(heads) as port:
            there = settings.model_copy(update={"vllm": f"http://127.0.0.1:{port}"})
            async with open_client(there, tls_context(there), timeout_s=5.0) as client:
                scraper = Scraper(client, parser=PageParser("vllm:"), timeout_s=5.0)
                outcomes = [(await scraper.scrape()).outcome]
                path.write_text("second")
                outcomes.append((await scraper.scrape()).outcome)
                for broken in ("", "two words", "ünprintable"):
                    path.write_text(broken)
                    failed = await scraper.scrape()
                    assert str(path) in failed.detail
                    assert not broken or broken not in failed.detail
                    outcomes.append(failed.outcome)
                path.unlink()
                outcomes.append((await scraper.scrape()).outcome)
                for make in (os.mkfifo, os.mkdir):
                    make(path)
                    failed = await scraper.scrape()
                    assert f"cannot read the vllm_token_file {path}" in failed.detail
                    outcomes.append(failed.outcome)
                    path.rmdir() if path.is_dir() else path.unlink()
                path.write_text("third")
                return [*outcomes, (await scraper.scrape()).outcome]

    good, unauthorized = ScrapeOutcome.OK, ScrapeOutcome.UNAUTHORIZED
    assert asyncio.run(main()) == [good, good, *(unauthorized for _ in range(6)), good]
    sent = [re.findall(r"Bearer (\w+)", head) for head in heads.pages]
    assert sent == [["first"], ["second"], ["third"]]


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_server_that_wants_a_token_is_told_with_the_setting(status: str) -> None:
    result = scrape_heads(Heads(response(b"", status=status)))
    assert result.outcome is ScrapeOutcome.UNAUTHORIZED
    assert "--vllm-token" in result.remedy


def test_a_unix_socket_is_scraped_and_its_absence_is_a_refusal(tmp_path: Path) -> None:
    path, heads = tmp_path / "vllm.sock", Heads(PAGE)

    async def main() -> tuple[ScrapeResult, ScrapeResult]:
        async with raw_server(heads, path=path):
            seen = await scrape(f"unix:{path}")
        path.unlink(missing_ok=True)
        return seen, await scrape(f"unix:{path}")

    seen, gone = asyncio.run(main())
    assert (seen.outcome, gone.outcome) == (ScrapeOutcome.OK, ScrapeOutcome.REFUSED)
    assert "with this path as --uds" in gone.remedy
    assert heads.heads[0].startswith("GET /metrics HTTP/1.1\r\n")


def test_a_unix_socket_that_nobody_listens_at_is_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "vllm.sock"
    path.touch()
    assert asyncio.run(scrape(f"unix:{path}")).outcome is ScrapeOutcome.REFUSED


def test_a_base_path_comes_before_every_path() -> None:
    heads = Heads(PAGE)
    assert scrape_heads(heads, base="/gpu/7/").outcome is ScrapeOutcome.OK
    assert [head.split(" ")[1] for head in heads.heads] == ["/gpu/7/metrics", "/gpu/7/health"]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert scrape_heads(Heads(PAGE)).outcome is ScrapeOutcome.OK


@pytest.mark.parametrize("location", ["elsewhere", "http://[broken", "x" * 5000, ""])
def test_a_redirect_is_not_followed_and_said(location: str) -> None:
    elsewhere = Heads(PAGE)

    async def main() -> ScrapeResult:
        async with raw_server(elsewhere) as target:
            where = f"http://127.0.0.1:{target}/metrics" if location == "elsewhere" else location
            async with raw_server(redirecting(where)) as port:
                return await scrape(f"http://127.0.0.1:{port}")

    result = asyncio.run(main())
    assert not elsewhere.heads
    assert result.outcome in {ScrapeOutcome.REDIRECTED, ScrapeOutcome.BROKEN}
    assert len(result.detail) <= 300
    if location == "elsewhere":
        assert "redirects are not followed; give the final base URL to --vllm" in result.explanation


def test_a_host_that_has_no_address_is_unreachable_and_not_down() -> None:
    assert asyncio.run(scrape("http://no-such-host.invalid")).outcome in {
        ScrapeOutcome.UNREACHABLE,
        ScrapeOutcome.TIMEOUT,
    }


def test_cookies_of_the_server_are_not_kept() -> None:
    heads = Heads(response(capture("busy").encode(), Set_Cookie="grows=1; Path=/"))

    async def main() -> None:
        async with raw_server(heads) as port:
            await scrape(f"http://127.0.0.1:{port}", times=3)

    asyncio.run(main())
    assert len(heads.pages) == 3
    assert "cookie" not in "".join(heads.heads).lower()


def test_compression_is_not_asked_for() -> None:
    heads = Heads(PAGE)
    scrape_heads(heads)
    assert "accept-encoding: identity\r\n" in heads.heads[0].lower()
