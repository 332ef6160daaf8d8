"""Asking the one that leads, of processes that can give one service.

A standby answers 503 and names the leader in `LEADER_HEADER`. That URL is followed once. Whoever stands behind a URL
could name any: where this process has a token it is sent to hosts that were given and to no other, and never over plain
HTTP where HTTPS was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from service.client import client_options, refusal
from service.errors import UnavailableError, WadilocoError
from service.settings import PeerSettings
from service.urls import check_url

LEADER_HEADER = "Leader-URL"
STANDBY = "StandbyError"


@contextmanager
def ask_leader(
    settings: PeerSettings,
    urls: Sequence[str],
    method: str,
    path: str,
    *,
    timeout_s: float,
    field: str,
    **arguments: Any,
) -> Iterator[httpx.Response]:
    """The answer of the first of these processes that leads, unread; ``field`` is the option that named them.

    Raises:
        UnavailableError: none of them can be reached and leads.
        httpx.HTTPError: one was reached, and broke off; what it was asked may have been done.
    """
    waiting, followed = deque(urls), False
    trouble: WadilocoError | None = None
    while waiting:
        url = waiting.popleft()
        with httpx.Client(**client_options(settings, url, timeout_s=timeout_s)) as http:
            try:
                response = http.send(http.build_request(method, path, **arguments), stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
                trouble = _no_answer(url, exc, field)
                continue
            try:
                standby = _refusal_of_standby(response, field)
                if standby is None:
                    yield response
                    return
            finally:
                response.close()
            trouble, leader = standby, _leader_of(response)
            if leader is not None and not followed and leader not in urls:
                followed = True
                if may_follow(settings, urls, leader):
                    waiting.appendleft(leader)
                else:
                    trouble = UnavailableError(
                        standby.message, field=field, remedy=f"give {leader} too, if the token may be sent there"
                    )
    assert trouble is not None
    raise trouble


def _no_answer(url: str, exc: httpx.HTTPError, field: str) -> UnavailableError:
    return UnavailableError(
        f"no answer from {url}: {exc or type(exc).__name__}", field=field, remedy="start it, or give its URL"
    )


def _refusal_of_standby(response: httpx.Response, field: str) -> WadilocoError | None:
    """What a standby said; None when it is no standby that answers."""
    if response.status_code != 503:
        return None
    response.read()
    try:
        kind = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return refusal(response, field=field) if kind == STANDBY else None


def _leader_of(response: httpx.Response) -> str | None:
    try:
        return check_url(response.headers[LEADER_HEADER])
    except (KeyError, ValueError):
        return None


def may_follow(settings: PeerSettings, urls: Sequence[str], leader: str) -> bool:
    """Whether a URL that none of us gave may be asked: always where there is nothing to lose."""
    if settings.token is None:
        return True
    to = urlsplit(leader)
    given = [urlsplit(url) for url in urls]
    return any(one.hostname == to.hostname and one.scheme in {to.scheme, "http"} for one in given)
