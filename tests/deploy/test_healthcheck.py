"""The health check of the images, against real services."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from replay.processes import Children, free_ports
from tests.conftest import ROOT
from tests.integration.helpers import WADILOCO, eventually
from tests.ports import share_of

pytestmark = pytest.mark.integration

SCRIPT = ROOT / "deploy" / "docker" / "healthcheck.py"


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def is_healthy(environment: Mapping[str, str]) -> bool:
    return check("controller", **environment).returncode == 0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate of another name than the loopback address, and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=controller")
    subprocess.run([*request, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.mark.parametrize("security", ["plain", "tls", "mutual tls"])
def test_a_living_service_is_healthy_until_it_ends(
    children: Children, tmp_path: Path, certificate: tuple[Path, Path], security: str
) -> None:
    cert, key = (str(path) for path in certificate)
    environment = {"WADILOCO_CONTROLLER_PORT": str(free_ports(1, share_of(range(19200, 19300)))[0])}
    if security != "plain":
        environment |= {"WADILOCO_CONTROLLER_TLS_CERT": cert, "WADILOCO_CONTROLLER_TLS_KEY": key}
    settings = environment | ({"WADILOCO_CONTROLLER_TLS_CA": cert} if security == "mutual tls" else {})
    command = [*WADILOCO, "controller", "--journal", str(tmp_path / "journal.sqlite")]
    children.start("controller", command, log=tmp_path / "log", env=settings)
    eventually(lambda: is_healthy(environment), what="health")
    children.check()
    # A proxy in the environment is for others.
    assert is_healthy(environment | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"})
    children.stop()
    assert not is_healthy(environment)


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({}, "WADILOCO_SIDECAR_PORT is not set"),
        ({"WADILOCO_SIDECAR_PORT": "9"}, "no answer"),
        ({"WADILOCO_SIDECAR_PORT": "x"}, "no answer"),
        ({"WADILOCO_SIDECAR_PORT": "9", "WADILOCO_SIDECAR_TLS_CERT": "/no/such/file"}, "no answer"),
    ],
)
def test_a_service_that_cannot_be_asked_is_not_healthy_and_the_line_says_why(
    environment: dict[str, str], complaint: str
) -> None:
    done = check("sidecar", **environment)
    assert done.returncode == 1
    assert done.stderr.startswith(f"sidecar: {complaint}")
    assert done.stderr.count("\n") == 1


def test_without_a_service_it_tells_its_usage() -> None:
    done = check()
    assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True)
