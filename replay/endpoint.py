"""An OpenAI-compatible completion server: its address, its request bytes, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from replay.completion_stream import explain_error
from service.errors import InputError, UnavailableError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens."""

    url: str
    """Base URL without ``/v1``."""
    host: str
    port: int
    path: str
    tls: bool


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    url: str
    model: str
    max_model_len: int


def parse_endpoint(server: str) -> Endpoint:
    """The address in a base URL; a trailing ``/v1`` is tolerated.

    Raises:
        InputError: not an http(s) URL.
    """
    base = server.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(base)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InputError(
            f"{server!r} is not a server's URL", field="--server", remedy="write it as http://127.0.0.1:8000"
        )
    tls = parts.scheme == "https"
    return Endpoint(
        url=base, host=parts.hostname, port=port or (443 if tls else 80), path=parts.path.rstrip("/"), tls=tls
    )


class CompletionRequests:
    """Makes the bytes of requests to one endpoint."""

    def __init__(self, endpoint: Endpoint, *, model: str, api_key: str | None) -> None:
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {endpoint.path}/v1/completions HTTP/1.1\r\nHost: {host}:{endpoint.port}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n{authorization}Content-Length: "
        )
        # Answers of exactly the planned length: greedy, and on past the end-of-sequence token.
        self._common = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "ignore_eos": True,
        }

    def payload(self, prompt_token_ids: Sequence[int], max_tokens: int) -> bytes:
        body = json.dumps({**self._common, "max_tokens": max_tokens, "prompt": prompt_token_ids}).encode()
        return f"{self._head}{len(body)}\r\n\r\n".encode() + body


async def discover(
    server: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 5.0
) -> ServerInfo:
    """Ask ``/v1/models`` of ``server`` which model it serves; ``model`` must be among them if given.

    Raises:
        UnavailableError: nobody answers.
        InputError: not a URL, not a vLLM server, or it does not serve ``model``.
    """
    endpoint = parse_endpoint(server)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, headers=headers) as client:
            response = await client.get(f"{endpoint.url}/v1/models")
    except httpx.HTTPError as exc:
        raise UnavailableError(
            f"{endpoint.url} does not answer ({type(exc).__name__}: {exc})",
            field="--server",
            remedy="start the server, or correct the URL",
        ) from exc
    if response.status_code in {401, 403}:
        raise InputError(f"{endpoint.url} wants an API key", field="--api-key", remedy="give the server's --api-key")
    if response.status_code == 503:
        raise UnavailableError(
            f"{endpoint.url} is not ready: {explain_error(response.content)}", field="--server", remedy="wait for it"
        )
    return _choose_model(endpoint.url, _model_lengths(endpoint.url, response), model)


def _model_lengths(url: str, response: httpx.Response) -> dict[str, int]:
    try:
        answer: Any = response.json()
        lengths = {str(card["id"]): int(card["max_model_len"]) for card in answer["data"]}
    except (ValueError, KeyError, TypeError) as exc:
        raise _not_vllm(url, response) from exc
    if response.status_code != 200 or not lengths:
        raise _not_vllm(url, response)
    return lengths


def _not_vllm(url: str, response: httpx.Response) -> InputError:
    return InputError(
        f"{url} is not a vLLM server: /v1/models answers HTTP {response.status_code} without models and max_model_len",
        field="--server",
        remedy="give the base URL of a vLLM API server",
    )


def _choose_model(url: str, lengths: dict[str, int], model: str | None) -> ServerInfo:
    chosen = next(iter(lengths)) if model is None else model
    if chosen not in lengths:
        served = ", ".join(lengths)
        raise InputError(f"{url} does not serve {chosen!r}", field="--model", remedy=f"it serves {served}")
    return ServerInfo(url=url, model=chosen, max_model_len=lengths[chosen])
