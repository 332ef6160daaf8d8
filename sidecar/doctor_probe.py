"""Asks a server and its peers what the doctor wants to know. Every wait has a deadline; nothing raises.

Names are resolved first, on threads that the process does not wait for: a resolver that hangs would else hold the end.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from service.client import ClientOptions, explain_response
from service.deadline import deadline
from sidecar.doctor_evidence import PeerEvidence, ServerEvidence
from sidecar.source.parse import PageParser
from sidecar.source.remedies import remedy_of
from sidecar.source.scrape import Scraper, strange_encoding
from sidecar.source.snapshot import ScrapeOutcome, ScrapeResult
from sidecar.source.transport import TokenError, open_client
from sidecar.vllm_settings import VllmSettings

logger = logging.getLogger(__name__)

SCRAPE_PERIOD_S = 0.5
MAX_ANSWER_BYTES = 64 << 10
GUARDED = {"sidecar": "/v1/pace", "controller": "/v1/policy"}
"""A path of each peer that needs the token."""


class Probe:
    """Asks with one deadline per answer."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def server(self, settings: VllmSettings, context: ssl.SSLContext | bool, *, watch_s: float) -> ServerEvidence:
        """Scrape for ``watch_s`` seconds the way a sidecar does, and ask for the version."""
        url, host, is_local = settings.vllm, "", True
        if settings.vllm_socket is None:
            host = urlsplit(url).hostname or ""
            addresses = await asyncio.to_thread(resolve, url, timeout_s=self._timeout_s)
            if isinstance(addresses, str):
                return ServerEvidence(url=url, host=host, resolve_error=addresses)
            is_local = any(map(is_own_address, addresses))
        dates: list[float] = []

        async def note_date(response: httpx.Response) -> None:
            sent_s = parse_date(response.headers.get("date"))
            if sent_s is not None:
                dates.append(sent_s - time.time())

        async with open_client(settings, context, timeout_s=self._timeout_s) as client:
            client.event_hooks = {"response": [note_date]}
            parser = PageParser(settings.metric_prefix, replica=settings.metric_replica)
            scraper = Scraper(
                client,
                parser=parser,
                timeout_s=self._timeout_s,
                is_socket=settings.vllm_socket is not None,
                timeout_option="--timeout-s",
            )
            results = await watch(scraper, watch_s=watch_s)
            is_answering = results[0].outcome in (ScrapeOutcome.OK, ScrapeOutcome.NO_SERIES)
            version = await self._version(client) if is_answering else None
        return ServerEvidence(
            url=url,
            host=host,
            is_local=is_local,
            results=results,
            skew_s=skew(dates),
            version=version,
        )

    async def peer(self, name: str, options: ClientOptions) -> PeerEvidence:
        """Whether a sidecar or controller is alive and takes the token."""
        url = options["base_url"]
        addresses = await asyncio.to_thread(resolve, url, timeout_s=self._timeout_s)
        if isinstance(addresses, str):
            return PeerEvidence(name=name, url=url, problem=addresses, remedy=f"check the host in --{name}")
        async with httpx.AsyncClient(**options) as client:
            health = await self._ask(client, "/healthz")
            if isinstance(health, str):
                remedy = f"start the {name}, or correct --{name}"
                return PeerEvidence(name=name, url=url, problem=health, remedy=remedy)
            body = as_json(health)
            if health.is_error or not isinstance(body, dict) or "status" not in body:
                problem = "a task of it died" if health.status_code == 503 else f"is no {name}"
                remedy = f"see its log and {url}/healthz" if health.status_code == 503 else f"correct --{name}"
                return PeerEvidence(name=name, url=url, problem=problem, remedy=remedy)
            guarded = await self._ask(client, GUARDED[name])
            if isinstance(guarded, str):
                return PeerEvidence(name=name, url=url, problem=guarded, remedy="see its log")
            if guarded.is_error:
                remedy = "set --token to that of the fleet" if guarded.status_code == 401 else f"correct --{name}"
                return PeerEvidence(name=name, url=url, problem=explain_response(guarded), remedy=remedy)
        return PeerEvidence(name=name, url=url)

    async def _version(self, client: httpx.AsyncClient) -> str | None:
        answer = await self._ask(client, "version")
        if isinstance(answer, str) or answer.is_error:
            return None
        body = as_json(answer)
        version = body.get("version") if isinstance(body, dict) else None
        return version if isinstance(version, str) else None

    async def _ask(self, client: httpx.AsyncClient, path: str) -> httpx.Response | str:
        """The answer with its body, at most `MAX_ANSWER_BYTES` of it; or why there is none."""
        try:
            headers = {"Accept-Encoding": "identity"}
            with deadline(self._timeout_s):
                return await _read(client, path, headers)
        except (TimeoutError, httpx.TimeoutException):
            return f"no answer within {self._timeout_s:g} s"
        except (httpx.HTTPError, TokenError) as exc:
            return f"{type(exc).__name__}: {exc}"


async def _read(client: httpx.AsyncClient, path: str, headers: dict[str, str]) -> httpx.Response | str:
    async with client.stream("GET", path, headers=headers) as response:
        if (strange := strange_encoding(response)) is not None:
            return f"answered {path} {strange}"
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                return f"answered {path} with over {MAX_ANSWER_BYTES} bytes"
        return httpx.Response(response.status_code, content=bytes(body))


async def watch(scraper: Scraper, *, watch_s: float) -> tuple[ScrapeResult, ...]:
    """Scrapes over so many seconds, at least two; one alone when it was no good."""
    results = [await scrape(scraper)]
    if results[0].outcome is not ScrapeOutcome.OK:
        return tuple(results)
    deadline_s = time.monotonic() + watch_s
    while len(results) < 2 or time.monotonic() < deadline_s:
        # The last one is at the end, to watch for no less than was asked.
        await asyncio.sleep(max(min(SCRAPE_PERIOD_S, deadline_s - time.monotonic()), 0.0))
        results.append(await scrape(scraper))
    return tuple(results)


async def scrape(scraper: Scraper) -> ScrapeResult:
    """One scrape, whatever the server makes of it."""
    try:
        return await scraper.scrape()
    except Exception as exc:
        logger.info("a scrape failed in the scraper itself", exc_info=True)
        return ScrapeResult(
            outcome=ScrapeOutcome.INTERNAL,
            t_s=time.time(),
            monotonic_s=time.monotonic(),
            duration_s=0.0,
            detail=f"{type(exc).__name__}: {exc}",
            remedy=remedy_of(ScrapeOutcome.INTERNAL),
        )


def resolve(
    url: str, *, timeout_s: float, lookup: Callable[..., list[Any]] = socket.getaddrinfo
) -> tuple[str, ...] | str:
    """The addresses of a URL's host; or why there are none."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    found: list[tuple[str, ...] | str] = []

    def look() -> None:
        try:
            found.append(tuple(str(entry[4][0]) for entry in lookup(host, port, type=socket.SOCK_STREAM)))
        except (OSError, UnicodeError) as exc:
            found.append(f"{host}: {getattr(exc, 'strerror', None) or exc}")

    thread = threading.Thread(target=look, name="resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else f"{host}: no address within {timeout_s:g} s"


def is_own_address(address: str) -> bool:
    """Whether an address is one of this machine's: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def parse_date(text: str | None) -> float | None:
    """Unix time of a ``Date`` header; None when it is none."""
    if text is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def skew(differences_s: list[float]) -> float | None:
    """Clock difference from those of several headers, each cut to whole seconds: half a second is added back."""
    return sorted(differences_s)[len(differences_s) // 2] + 0.5 if differences_s else None


def as_json(response: httpx.Response) -> Any:
    """The body; None when it is no JSON."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None
