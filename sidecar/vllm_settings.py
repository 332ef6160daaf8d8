"""How to reach one vLLM server, and which of its series count: the settings of every command that scrapes one."""

from __future__ import annotations

import os
import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, FilePath, SecretStr, field_validator, model_validator

from service.settings import PeerSettings
from service.urls import check_url

UNIX = "unix:"
MAX_SOCKET_PATH_BYTES = 107
"""Of sun_path on Linux, without its closing zero."""


class VllmSettings(PeerSettings):
    """The way to one vLLM server; what leads to the fleet's own services is beside it and never sent there."""

    vllm: str
    """Base URL of the vLLM server, such as http://127.0.0.1:8000; or unix:/run/vllm.sock for its --uds."""
    vllm_ca: FilePath | None = None
    """CA (PEM) that the certificate of an https --vllm must chain to. Left out, it is --tls-ca, then the system's."""
    vllm_cert: FilePath | None = None
    """Client certificate (PEM) for an https --vllm that asks for one; needs --vllm-key. Left out, it is --tls-cert
    where the CA is --tls-ca."""
    vllm_key: FilePath | None = None
    """Private key (PEM) of --vllm-cert."""
    vllm_token: SecretStr | None = None
    """Bearer token for what stands before the server's /metrics; the fleet's --token is never sent there. Others on the
    host can read a command line: prefer the environment or --vllm-token-file."""
    vllm_token_file: FilePath | None = None
    """File that holds that token, read at every scrape."""
    metric_prefix: str = Field(default="vllm:", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")
    """What the server's series begin with; ray_vllm_ under Ray Serve."""
    metric_replica: str | None = Field(default=None, min_length=1, max_length=256)
    """ReplicaId label of the one replica that counts, where a page of Ray Serve has several; left out, they add up."""

    @field_validator("vllm")
    @classmethod
    def _check_server(cls, url: str) -> str:
        return check_socket(url) if url.strip().startswith(UNIX) else check_base_url(url)

    @model_validator(mode="after")
    def _check_way_to_server(self) -> Self:
        if (self.vllm_cert is None) != (self.vllm_key is None):
            raise ValueError("vllm_cert and vllm_key go together: give both or neither")
        if (self.vllm_ca or self.vllm_cert) and not self.vllm_base_url.startswith("https:"):
            raise ValueError("vllm_ca and vllm_cert are for TLS: give an https URL to vllm, or leave them out")
        if self.vllm_token is not None and self.vllm_token_file is not None:
            raise ValueError("vllm_token and vllm_token_file are two ways to give one token: leave one out")
        # Checked here and not at the field: the message of a field quotes its value.
        if self.vllm_token is not None and not is_token(self.vllm_token.get_secret_value().strip()):
            raise ValueError("vllm_token is empty or has characters that no header can hold: give printable ASCII")
        return self

    @property
    def vllm_socket(self) -> str | None:
        """Path of the server's Unix socket; None where it listens on TCP."""
        return self.vllm.removeprefix(UNIX) if self.vllm.startswith(UNIX) else None

    @property
    def vllm_base_url(self) -> str:
        """What paths of the server are relative to; over a Unix socket the host is a mere name."""
        return self.vllm if self.vllm_socket is None else "http://localhost"


def check_base_url(url: str) -> str:
    """``url`` without a trailing slash, if a base URL it is.

    Raises:
        ValueError: it is not an http(s) URL of a host.
    """
    checked = check_url(url)
    parts = urlsplit(checked)
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("a base URL has no user, query or fragment: write http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/metrics"):
        raise ValueError("give the base URL without /metrics")
    return checked


def check_socket(address: str) -> str:
    """``unix:/path`` of a Unix socket, which need not exist yet.

    Raises:
        ValueError: the path is not absolute, or longer than the kernel takes.
    """
    path = socket_path(address)
    if not path.startswith("/") or path.startswith("//") or "\0" in path:
        raise ValueError("not the absolute path of a Unix socket: write unix:/run/vllm.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"path of a Unix socket over {MAX_SOCKET_PATH_BYTES} bytes: start vLLM with a shorter --uds")
    return UNIX + path


def is_token(text: str) -> bool:
    """Whether ``text`` can stand in an Authorization header."""
    return re.fullmatch(r"[\x21-\x7e]+", text) is not None


def socket_path(address: str) -> str:
    """``/path`` of ``unix:/path`` or ``unix:///path``; whether it can be one `check_socket` says."""
    path = address.strip().removeprefix(UNIX)
    return path.removeprefix("//") if path.startswith("///") else path
