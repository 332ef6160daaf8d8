"""The way to one vLLM server: TCP or a Unix socket, TLS and client certificate, bearer token.

Redirects are not followed and proxies of the environment not used: a page from elsewhere would be about another server.
Nothing that the server sends is kept, cookies included, and no compression is asked for.
"""

from __future__ import annotations

import errno
import os
import ssl
import stat
from collections.abc import Generator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path

import httpx

from service.errors import ConfigError
from sidecar.vllm_settings import VllmSettings, is_token

# Text is preferred; vLLM's Rust front end has OpenMetrics alone.
HEADERS = {
    "Accept": "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.8, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "wadiloco-sidecar",
}
MAX_TOKEN_BYTES = 64 << 10


class TokenError(Exception):
    """The token file cannot be used just now; it never says what the file holds."""


class BearerToken(httpx.Auth):
    def __init__(self, token: str) -> None:
        self._token = token

    def read(self) -> str:
        return self._token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.read()}"
        yield request


class BearerTokenFile(BearerToken):
    """Reads the file for every request: tokens that are rotated in place are short-lived."""

    def __init__(self, path: Path) -> None:
        super().__init__("")
        self._path = path

    def read(self) -> str:
        try:
            token = _read_regular(self._path, MAX_TOKEN_BYTES).decode("ascii", errors="replace").strip()
        except OSError as exc:
            raise TokenError(f"cannot read the vllm_token_file {self._path}: {exc.strerror or exc}") from exc
        if not is_token(token):
            raise TokenError(f"the vllm_token_file {self._path} holds no token")
        return token


def _read_regular(path: Path, max_bytes: int) -> bytes:
    """The first bytes of a file; what may block, as a pipe does, is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.read(fd, max_bytes)
    finally:
        os.close(fd)


def open_client(settings: VllmSettings, context: ssl.SSLContext | bool, *, timeout_s: float) -> httpx.AsyncClient:
    """A client whose relative paths are those of the server; ``context`` comes from `tls_context`.

    Each of its waits ends after ``timeout_s`` seconds.
    """
    transport = httpx.AsyncHTTPTransport(
        verify=context,
        trust_env=False,
        uds=settings.vllm_socket,
        limits=httpx.Limits(max_connections=2, max_keepalive_connections=1),
    )
    return httpx.AsyncClient(
        base_url=settings.vllm_base_url + "/",
        headers=HEADERS,
        auth=_auth(settings),
        cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),
        timeout=httpx.Timeout(timeout_s),
        transport=transport,
        trust_env=False,
        follow_redirects=False,
    )


def tls_context(settings: VllmSettings) -> ssl.SSLContext | bool:
    """What certificates to trust and to show; True for those that the system trusts.

    Raises:
        ConfigError: a file holds no certificate or key, or they do not belong together.
    """
    if not settings.vllm_base_url.startswith("https:"):
        return True
    ca, given = (settings.vllm_ca, "vllm_ca") if settings.vllm_ca else (settings.tls_ca, "tls_ca")
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{ca} is no CA certificate (PEM): {exc}", field=given) from exc
    cert, key, given = settings.vllm_cert, settings.vllm_key, "vllm_cert"
    if cert is None and ca is settings.tls_ca:
        cert, key, given = settings.tls_cert, settings.tls_key, "tls_cert"
    if cert is not None and key is not None:
        try:
            # Without a password OpenSSL would ask for it on the terminal.
            context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as exc:
            remedy = "give a certificate and its unencrypted key (PEM)"
            raise ConfigError(f"{cert} and {key} do not work: {exc}", field=given, remedy=remedy) from exc
    return context


def _auth(settings: VllmSettings) -> BearerToken | None:
    if settings.vllm_token is not None:
        return BearerToken(settings.vllm_token.get_secret_value().strip())
    return None if settings.vllm_token_file is None else BearerTokenFile(settings.vllm_token_file)
