"""The ways of ``wadiloco doctor`` to a server: those of a sidecar, each against a real server on this host."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from sidecar.doctor import DoctorSettings, gate_port
from sidecar.source.transport import HEADERS
from tests.sidecar.authority import Authority
from tests.sidecar.conftest import Doctor
from tests.sidecar.helpers import Upstream, capture, serving
from tests.sidecar.raw_server import Answer, Heads, raw_server, redirecting, response, saying

pytestmark = pytest.mark.usefixtures("root_logging")

PAGE = response(capture("busy").encode())
OK = saying(PAGE)


def diagnose(
    doctor: Doctor,
    answer: Answer,
    *options: object,
    scheme: str = "http",
    context: ssl.SSLContext | None = None,
    path: Path | None = None,
) -> dict[str, Any]:
    """What the doctor finds at a server that answers so."""

    async def main() -> dict[str, Any]:
        async with raw_server(answer, context=context, path=path) as port:
            url = f"{scheme}://127.0.0.1:{port}" if path is None else f"unix:{path}"
            return await asyncio.to_thread(doctor, url, *options)

    return asyncio.run(main())


@pytest.mark.parametrize("option", ["--vllm-ca", "--tls-ca"])
def test_a_certificate_of_an_own_ca_is_trusted(doctor: Doctor, authority: Authority, option: str) -> None:
    context = authority.context()
    found = diagnose(doctor, OK, option, authority.ca, scheme="https", context=context)
    assert found["reachable"]["message"].endswith("answered over TLS")


def test_the_ca_of_the_server_goes_before_that_of_the_fleet(
    doctor: Doctor, authority: Authority, stranger: Authority
) -> None:
    options = ("--vllm-ca", authority.ca, "--tls-ca", stranger.ca)
    found = diagnose(doctor, OK, *options, scheme="https", context=authority.context())
    assert found["reachable"]["status"] == "ok"


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_a_certificate_that_does_not_fit_names_the_ca_and_the_host_name(
    doctor: Doctor, authority: Authority, stranger: Authority, host: str
) -> None:
    ca = stranger.ca if host == "127.0.0.1" else authority.ca
    found = diagnose(doctor, OK, "--vllm-ca", ca, scheme="https", context=authority.context(host=host))["reachable"]
    assert found["message"].startswith("tls: ")
    assert found["remedy"].startswith("set --vllm-ca ")


def test_a_client_certificate_is_shown(doctor: Doctor, authority: Authority) -> None:
    context = authority.context(ask_clients=True)
    for prefix in ("--vllm", "--tls"):
        files = (f"{prefix}-ca", authority.ca, f"{prefix}-cert", authority.cert, f"{prefix}-key", authority.key)
        assert diagnose(doctor, OK, *files, scheme="https", context=context)["reachable"]["status"] == "ok"


def test_a_client_certificate_that_is_missing_or_of_another_authority_is_named(
    doctor: Doctor, authority: Authority, stranger: Authority
) -> None:
    context = authority.context(ask_clients=True)
    ca = ("--vllm-ca", authority.ca)
    for shown in ((), ("--vllm-cert", stranger.cert, "--vllm-key", stranger.key)):
        found = diagnose(doctor, OK, *ca, *shown, scheme="https", context=context)["reachable"]
        # Whether the alert or the end of the connection is seen first is the kernel's choice.
        assert found["message"].startswith(("tls: ", "broken: "))
        assert "set --vllm-cert " in found["remedy"]


def test_a_scheme_that_is_wrong_is_named(doctor: Doctor, authority: Authority) -> None:
    upstream = Upstream(capture("busy"))
    with serving(upstream):
        assert "the scheme of --vllm" in doctor(upstream.url.replace("http:", "https:"))["reachable"]["remedy"]
    assert "try https:// in --vllm" in diagnose(doctor, OK, context=authority.context())["reachable"]["remedy"]


def test_tokens_go_to_the_server_and_that_of_the_fleet_does_not(doctor: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-the-server\n")
    for options in (("--vllm-token", "of-the-server"), ("--vllm-token-file", file), ()):
        heads = Heads(PAGE)
        diagnose(doctor, heads, *options, "--token", "of-the-fleet")
        assert any("GET /version " in head for head in heads.heads)
        assert "of-the-fleet" not in "".join(heads.heads)
        assert all(("authorization: bearer of-the-server\r\n" in head.lower()) == bool(options) for head in heads.heads)


def test_the_token_of_the_server_does_not_go_to_a_peer(doctor: Doctor) -> None:
    heads = Heads(response(json.dumps({"status": "ok"}).encode(), content_type="application/json"))

    async def main() -> dict[str, Any]:
        async with raw_server(heads) as peer, raw_server(OK) as port:
            options = ("--vllm-token", "of-the-server", "--token", "of-the-fleet")
            urls = (f"http://127.0.0.1:{port}", "--controller", f"http://127.0.0.1:{peer}")
            return await asyncio.to_thread(doctor, *urls, *options)

    assert asyncio.run(main())["controller"]["status"] == "ok"
    assert len(heads.heads) == 2
    assert all("authorization: bearer of-the-fleet\r\n" in head.lower() for head in heads.heads)


def test_a_server_that_wants_a_token_is_told_with_the_option(doctor: Doctor) -> None:
    found = diagnose(doctor, saying(response(b"", status="401 Unauthorized")))["reachable"]
    assert found["message"] == "unauthorized: HTTP 401"
    assert "--vllm-token-file" in found["remedy"]


def test_a_token_file_without_a_token_is_named_and_not_quoted(doctor: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("two words")
    heads = Heads(PAGE)
    found = diagnose(doctor, heads, "--vllm-token-file", file)["reachable"]
    assert (found["status"], heads.heads) == ("fail", [])
    assert str(file) in found["message"]
    assert "two words" not in json.dumps(found)


def test_a_unix_socket_is_looked_at_with_the_gate_beside_it(doctor: Doctor, tmp_path: Path) -> None:
    heads, path = Heads(PAGE), tmp_path / "vllm.sock"
    found = diagnose(doctor, heads, path=path)
    assert found["reachable"]["message"] == f"/metrics of unix:{path} answered"
    assert found["host"]["message"] == "a Unix socket is on this host"
    assert found["gate folder"]["message"].startswith(str(tmp_path / "gate"))
    assert f"accept: {HEADERS['Accept']}\r\n".lower() in heads.pages[0].lower()


@pytest.mark.parametrize(
    ("vllm", "port"), [("unix:/run/vllm.sock", 8000), ("http://h:81", 81), ("http://h", 80), ("https://h", 443)]
)
def test_the_gate_is_looked_for_where_the_plugin_puts_it(vllm: str, port: int) -> None:
    assert gate_port(DoctorSettings(vllm=vllm)) == port


def test_a_unix_socket_that_nobody_listens_at_names_the_option_of_vllm(doctor: Doctor, tmp_path: Path) -> None:
    path = tmp_path / "vllm.sock"
    for is_file in (False, True):
        if is_file:
            path.touch()
        found = doctor(f"unix:{path}")["reachable"]
        assert found["message"].startswith("refused")
        assert "--uds" in found["remedy"]


def test_a_redirect_is_said_once(doctor: Doctor) -> None:
    found = diagnose(doctor, redirecting("http://elsewhere/metrics"))["reachable"]
    assert found["message"] == "redirected: HTTP 307 to 'http://elsewhere/metrics': redirects are not followed"
    assert found["remedy"] == "give the final base URL to --vllm"


def test_one_replica_of_several_is_looked_at(doctor: Doctor) -> None:
    def page(replica: str) -> str:
        lines = capture("busy").replace("vllm:", "ray_vllm_").splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("#")]
        return "".join(line.replace("{", f'{{ReplicaId="{replica}",', 1) for line in kept)

    answer = saying(response((page("a") + page("b")).encode()))
    ray = ("--metric-prefix", "ray_vllm_")
    assert diagnose(doctor, answer, *ray, "--metric-replica", "b")["signals"]["status"] == "ok"
    missing = diagnose(doctor, answer, *ray, "--metric-replica", "c")["metrics"]
    assert missing["message"] == "no ray_vllm_ series of the replica c"
    assert diagnose(doctor, answer)["metrics"]["remedy"] == "set --metric-prefix ray_vllm_"
