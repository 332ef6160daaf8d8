"""Fetch one ``/metrics`` page of the server within one deadline and a bound on its bytes.

A time-out and a refusal mean different things: a saturated server is slow to answer, a dead one refuses. Every way to
fail has an outcome of its own, and none is raised. ``/health`` is asked every few seconds beside the page: while it
says 503 the server takes no requests (at every scrape then, so that its end is seen at once).
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx

from service.deadline import deadline
from sidecar.source.page import PageError
from sidecar.source.parse import PageParser, PageReader, PageTooLargeError
from sidecar.source.remedies import TIMEOUT_OPTION, remedy_of
from sidecar.source.snapshot import ScrapeOutcome, ScrapeResult
from sidecar.source.transport import TokenError

logger = logging.getLogger(__name__)

# A page of 100 engines is about 4 MB; more is not a vLLM server.
MAX_PAGE_BYTES = 16 << 20
HEALTH_PERIOD_S = 5.0
MAX_DETAIL = 300
UNAVAILABLE = 503


class Failure(NamedTuple):
    outcome: ScrapeOutcome
    detail: str
    """What failed."""
    remedy: str = ""
    """What the user can do about it, where the failure itself tells better than its kind."""


class AnswerError(Exception):
    """An answer that is no page."""

    def __init__(self, outcome: ScrapeOutcome, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(outcome, detail)


class Scraper:
    """Reads the page of one server over a client that it does not own (`sidecar.source.transport.open_client`)."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        parser: PageParser,
        timeout_s: float,
        is_socket: bool = False,
        timeout_option: str = TIMEOUT_OPTION,
    ) -> None:
        """``is_socket``, a server on a Unix socket, and the option that sets ``timeout_s`` are for remedies."""
        self._client = client
        self._parser = parser
        self._timeout_s = timeout_s
        self._is_socket = is_socket
        self._timeout_option = timeout_option
        self._ask_health_s = 0.0
        """When ``/health`` is due, on the monotonic clock."""

    async def scrape(self) -> ScrapeResult:
        """One attempt of at most ``timeout_s``; never raises for what the server or the network does."""
        started_s = time.monotonic()
        snapshot, accepts, failure = None, None, Failure(ScrapeOutcome.OK, "")
        deadline_s = started_s + self._timeout_s
        try:
            with deadline(self._timeout_s):
                reader = await self._read_page()
            snapshot = reader.finish(t_s=max(time.time(), 0.0), monotonic_s=time.monotonic())
            if snapshot is None:
                failure = Failure(ScrapeOutcome.NO_SERIES, *reader.lack)
        except Exception as exc:  # noqa: BLE001 - a server must not be able to end the task; each failure is counted
            failure = explain(exc, timeout_s=self._timeout_s)
        ended_s = time.monotonic()
        if snapshot is not None:
            accepts = await self._ask_health(deadline_s)
        return ScrapeResult(
            outcome=failure.outcome,
            t_s=snapshot.t_s if snapshot else max(time.time(), 0.0),
            monotonic_s=snapshot.monotonic_s if snapshot else ended_s,
            duration_s=ended_s - started_s,
            snapshot=snapshot,
            accepts=accepts,
            detail=failure.detail[:MAX_DETAIL],
            remedy=failure.remedy
            or remedy_of(failure.outcome, is_socket=self._is_socket, timeout_option=self._timeout_option),
        )

    async def _read_page(self) -> PageReader:
        async with self._client.stream("GET", "metrics") as response:
            check_answer(response)
            reader = self._parser.reader(response.headers.get("content-type", ""))
            num_bytes = 0
            async for chunk in response.aiter_raw():
                num_bytes += len(chunk)
                if num_bytes > MAX_PAGE_BYTES:
                    raise PageTooLargeError(f"page is over {MAX_PAGE_BYTES} bytes")
                reader.feed(chunk)
        return reader

    async def _ask_health(self, deadline_s: float) -> bool | None:
        """What ``/health`` says of requests; None when it is not due, absent or silent."""
        if time.monotonic() < self._ask_health_s:
            return None
        self._ask_health_s = time.monotonic() + HEALTH_PERIOD_S
        try:
            with deadline(deadline_s - time.monotonic()):
                async with self._client.stream("GET", "health") as response:
                    status = response.status_code
        except Exception as exc:  # noqa: BLE001 - the page was good: silence here says nothing
            logger.debug("health not told: %s", explain(exc, timeout_s=self._timeout_s).detail)
            return None
        if status == UNAVAILABLE:
            self._ask_health_s = 0.0
            return False
        return True if status == httpx.codes.OK else None


def strange_encoding(response: httpx.Response) -> str | None:
    """What to say of a body that is encoded, as nobody asked for; None when it is not."""
    encoding = response.headers.get("content-encoding", "identity")[:40]
    return None if encoding.lower() == "identity" else f"encoded as {encoding!r}, which was not asked for"


def check_answer(response: httpx.Response) -> None:
    """Whether the head of an answer announces a page.

    Raises:
        AnswerError: it does not.
    """
    status = response.status_code
    if 300 <= status < 400:
        where = response.headers.get("location", "")[:120]
        detail = f"HTTP {status} to {where!r}: redirects are not followed"
        raise AnswerError(ScrapeOutcome.REDIRECTED, detail)
    if status in {401, 403}:
        raise AnswerError(ScrapeOutcome.UNAUTHORIZED, f"HTTP {status}")
    if status != httpx.codes.OK:
        raise AnswerError(ScrapeOutcome.HTTP_ERROR, f"HTTP {status}")
    if (strange := strange_encoding(response)) is not None:
        raise AnswerError(ScrapeOutcome.MALFORMED, strange)
    length = response.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > MAX_PAGE_BYTES):
        raise AnswerError(ScrapeOutcome.TOO_LARGE, f"announces {length[:20]} bytes, over {MAX_PAGE_BYTES}")


def explain(exc: BaseException, *, timeout_s: float) -> Failure:
    """The outcome of a failed attempt, and its sentence."""
    if isinstance(exc, AnswerError):
        return exc.failure
    if isinstance(exc, PageError):
        large = isinstance(exc, PageTooLargeError)
        return Failure(ScrapeOutcome.TOO_LARGE if large else ScrapeOutcome.MALFORMED, str(exc))
    if isinstance(exc, TokenError):
        remedy = "make it readable, with the token as one line of printable ASCII"
        return Failure(ScrapeOutcome.UNAUTHORIZED, str(exc), remedy)
    if isinstance(exc, TimeoutError | httpx.TimeoutException):
        return Failure(ScrapeOutcome.TIMEOUT, f"no whole page within {timeout_s:g} s: saturated")
    if isinstance(exc, httpx.HTTPError):
        return _explain_connection(exc)
    logger.error("scrape failed in the sidecar itself", exc_info=exc)
    return Failure(ScrapeOutcome.INTERNAL, f"{type(exc).__name__}: {exc}")


def _explain_connection(exc: httpx.HTTPError) -> Failure:
    """Under TLS 1.3 a client learns with the first answer only that its certificate was not taken."""
    is_new = isinstance(exc, httpx.ConnectError)
    for cause in causes(exc):
        if isinstance(cause, ssl.SSLError) and (is_new or not isinstance(cause, ssl.SSLEOFError)):
            return Failure(ScrapeOutcome.TLS, f"{cause}", _tls_remedy(cause.reason or ""))
        if is_new and isinstance(cause, ConnectionRefusedError | FileNotFoundError):
            return Failure(ScrapeOutcome.REFUSED, f"{cause}")
    remedy = ""
    request = exc._request  # the public property raises where there is none
    if isinstance(exc, httpx.RemoteProtocolError) and request is not None and request.url.scheme == "https":
        # vLLM's uvicorn drops the connection without a TLS alert.
        remedy = "servers that ask for a client certificate break off like this: set --vllm-cert and --vllm-key"
    outcome = ScrapeOutcome.UNREACHABLE if is_new else ScrapeOutcome.BROKEN
    return Failure(outcome, f"{type(exc).__name__}: {exc}", remedy)


def _tls_remedy(reason: str) -> str:
    """For a `ssl.SSLError.reason`; an alert is what the server said."""
    if reason == "CERTIFICATE_VERIFY_FAILED":
        return "set --vllm-ca to the CA of the server's certificate, and use a host name that is in it"
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return "the server wants a client certificate: set --vllm-cert and --vllm-key"
    if "ALERT_UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return "the server does not take the client certificate: set --vllm-cert to one of a CA that it trusts"
    if "EOF" in reason or not reason:
        # What a server that refuses the client's certificate leaves behind when its alert is lost.
        return "set --vllm-cert and --vllm-key if the server asks for a certificate, else correct the scheme of --vllm"
    return remedy_of(ScrapeOutcome.TLS)


def causes(exc: BaseException) -> Iterator[BaseException]:
    """An exception and all that led to it, members of groups included."""
    pending, seen = [exc], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            pending.extend(current.exceptions)
        pending.extend(cause for cause in (current.__cause__, current.__context__) if cause is not None)
