"""Fetch one ``/metrics`` page of the server, with a deadline and a cap on its size.

A time-out and a refusal mean different things: a saturated server is slow to answer, a dead one refuses.
"""

from __future__ import annotations

import asyncio
import time

import httpx

from sidecar.source.parse import PageError, PageParser
from sidecar.source.snapshot import ScrapeOutcome, ScrapeResult

# A page of 100 engines is about 4 MB; more is not a vLLM server.
MAX_PAGE_BYTES = 16 << 20


class Scraper:
    """Reads the page of one server over a client that it does not own."""

    def __init__(self, client: httpx.AsyncClient, *, parser: PageParser, timeout_s: float) -> None:
        self._client = client
        self._parser = parser
        self._timeout_s = timeout_s

    async def scrape(self) -> ScrapeResult:
        """One attempt; never raises for what the server or the network does."""
        started_s = time.monotonic()
        outcome, snapshot, detail = ScrapeOutcome.OK, None, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                text, content_type = await self._fetch()
            snapshot = self._parser.parse(
                text, content_type=content_type, t_s=time.time(), monotonic_s=time.monotonic()
            )
            if snapshot is None:
                outcome = ScrapeOutcome.NO_SERIES
        except PageError as exc:
            outcome, detail = ScrapeOutcome.MALFORMED, str(exc)
        except httpx.HTTPStatusError as exc:
            outcome, detail = ScrapeOutcome.HTTP_ERROR, f"HTTP {exc.response.status_code}"
        except (TimeoutError, httpx.TimeoutException):
            outcome, detail = ScrapeOutcome.TIMEOUT, f"no answer within {self._timeout_s} s"
        except httpx.ConnectError as exc:
            outcome, detail = ScrapeOutcome.REFUSED, str(exc)
        except httpx.HTTPError as exc:
            outcome, detail = ScrapeOutcome.BROKEN, f"{type(exc).__name__}: {exc}"
        ended_s = time.monotonic()
        return ScrapeResult(
            outcome=outcome,
            t_s=snapshot.t_s if snapshot else time.time(),
            monotonic_s=snapshot.monotonic_s if snapshot else ended_s,
            duration_s=ended_s - started_s,
            snapshot=snapshot,
            detail=detail,
        )

    async def _fetch(self) -> tuple[str, str]:
        body = bytearray()
        async with self._client.stream("GET", "metrics") as response:
            response.raise_for_status()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    raise PageError(f"page is over {MAX_PAGE_BYTES} bytes")
        return body.decode("utf-8", errors="replace"), response.headers.get("content-type", "")
