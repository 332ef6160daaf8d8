"""Base URLs as one gives them: refused where they are typed, not where a socket is opened in vain."""

from __future__ import annotations

from urllib.parse import urlsplit

HINT = "write http://HOST:PORT"


def check_url(url: str) -> str:
    """``url`` without a trailing slash, if it is an http or https URL of a host that can have an address.

    Raises:
        ValueError: it is not; says how one is written.
    """
    text = url.strip()
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        _check_names(text, host or "")
    except ValueError as exc:
        raise ValueError(f"not a URL ({exc}): {HINT}") from exc
    if parts.scheme not in {"http", "https"} or not host or port == 0:
        raise ValueError(f"not an http or https URL of a host: {HINT}")
    return text.rstrip("/")


def _check_names(url: str, host: str) -> None:
    """Raises `ValueError` for a host that the resolver, or the HTTP client, would raise a bare `UnicodeError` for."""
    import httpx  # Only where a URL is given: a service that calls nobody does without it.

    try:
        host.encode("idna")
        httpx.URL(url).host  # noqa: B018 - decodes it
    except UnicodeError as exc:
        raise ValueError(f"the host {host} has a part that is empty, too long or not to be encoded") from exc
    except httpx.InvalidURL as exc:
        raise ValueError(str(exc)) from exc


def check_urls(text: str) -> str:
    """As `check_url`, of one or several with commas."""
    return ",".join(check_url(url) for url in text.split(","))
