"""HTTP clients for talking to peers, with the token and TLS files of this process."""

from __future__ import annotations

import ssl
from typing import Any, TypedDict

import httpx

from service.errors import ConfigError, ConflictError, InputError, OverloadedError, UnavailableError, WadilocoError
from service.settings import PeerSettings
from service.urls import check_url


class ClientOptions(TypedDict):
    """Keyword arguments that `httpx.Client` and `httpx.AsyncClient` share."""

    base_url: str
    headers: dict[str, str]
    verify: ssl.SSLContext | bool
    timeout: httpx.Timeout
    trust_env: bool


def client_options(settings: PeerSettings, base_url: str, *, timeout_s: float) -> ClientOptions:
    """Options for a client of the peer at ``base_url`` whose every wait ends after ``timeout_s`` seconds.

    Raises:
        ConfigError: that is no URL, or a TLS file cannot be used.
    """
    try:
        check_url(base_url)
    except ValueError as exc:
        raise ConfigError(f"{base_url} is {exc}", field="URL") from exc
    headers = {"Authorization": f"Bearer {settings.token.get_secret_value()}"} if settings.token else {}
    try:
        verify = _verification(settings)
    except OSError as exc:  # what a TLS context raises for files that are no certificate or key, too
        raise ConfigError(f"a TLS file cannot be used: {exc}", field="tls_ca", remedy="give PEM files") from exc
    return ClientOptions(
        base_url=base_url, headers=headers, verify=verify, timeout=httpx.Timeout(timeout_s), trust_env=False
    )


def _verification(settings: PeerSettings) -> ssl.SSLContext | bool:
    if settings.tls_ca is None:
        return True
    context = ssl.create_default_context(cafile=str(settings.tls_ca))
    if settings.tls_cert is not None and settings.tls_key is not None:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


REFUSALS: dict[int, type[WadilocoError]] = {
    401: ConfigError,
    404: InputError,
    409: ConflictError,
    422: InputError,
    429: OverloadedError,
}


def refusal(response: httpx.Response, *, field: str) -> WadilocoError:
    """The error that a peer's error answer stands for; ``field`` names the peer where the answer tells nothing."""
    kind = REFUSALS.get(response.status_code, UnavailableError)
    try:
        body: Any = response.json()
        return kind(str(body["message"]), field=body.get("field"), remedy=body.get("remedy"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return UnavailableError(explain_response(response), field=field, remedy="give the peer's base URL")


def explain_response(response: httpx.Response) -> str:
    """The message of a peer's error answer, whatever its shape."""
    try:
        body: Any = response.json()
    except ValueError:
        return f"HTTP {response.status_code}: {response.text[:200]}"
    if isinstance(body, dict) and "message" in body:
        field = f"{body['field']}: " if body.get("field") else ""
        return f"HTTP {response.status_code}: {field}{body['message']}"
    return f"HTTP {response.status_code}: {str(body)[:200]}"
