"""The images as an engine would build and run them: confined, without torch, and at work beside a real server."""

from __future__ import annotations

import os
import signal
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.schema import Fleet
from replay.processes import Children, free_ports
from sidecar.schema import EngineState, Load
from tests.conftest import ROOT
from tests.deploy.conftest import BASE_IMAGE, DOCKER
from tests.deploy.containers import STATE, Container, Image, Storage, start
from tests.integration.helpers import eventually
from tests.ports import share_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SERVICES = ("sidecar", "controller")
PORTS = share_of(range(19100, 19200))
TOKEN = "a token of this test"  # noqa: S105
GATE = "/run/wadiloco/gate"
KEPT = {"sidecar": "sidecar.json", "controller": "controller.sqlite"}
STOP_DEADLINE_S = 15


class Host:
    """Starts containers on loopback with a token, a state folder each, and a gate that they share."""

    def __init__(self, images: Mapping[str, Image], children: Children, folder: Path) -> None:
        self._images = images
        self._children = children
        self._folder = folder
        self._ports = dict(zip(SERVICES, free_ports(len(SERVICES), PORTS), strict=True))
        self.token_file = folder / "secrets"
        self.token_file.mkdir()
        (self.token_file / "token.toml").write_text(f'token = "{TOKEN}"\n')
        self.gate = images["sidecar"].state_folder(folder / "gate")

    def state(self, service: str) -> Path:
        return self._folder / f"{service}-state"

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self._ports[service]}"

    def start(self, service: str, **settings: str) -> Container:
        image, prefix = self._images[service], f"WADILOCO_{service.upper()}_"
        given = {"HOST": "127.0.0.1", "PORT": str(self._ports[service]), **settings}
        container = start(
            self._children,
            image,
            name=service,
            logs=self._folder,
            mounts={
                image.state_folder(self.state(service)): STATE,
                self.gate: GATE,
                self.token_file: "/run/secrets",
            },
            environment={f"{prefix}{name}": value for name, value in given.items()},
            arguments=("--config", "/run/secrets/token.toml"),
        )
        eventually(lambda: self.is_alive(service), what=f"{service} alive")
        return container

    def is_alive(self, service: str) -> bool:
        self._children.check()
        return self.get(service, "/healthz").is_success

    def get(self, service: str, path: str, token: str = TOKEN) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(f"{self.url(service)}{path}", headers=headers, timeout=5, trust_env=False)


@pytest.fixture
def host(images: dict[str, Image], children: Children, tmp_path: Path) -> Iterator[Host]:
    yield Host(images, children, tmp_path)
    for child in children.running:
        child.process.kill()  # `unshare` hears no SIGTERM, and takes process 1 along


@pytest.mark.parametrize("service", SERVICES)
def test_the_image_says_who_it_is_and_runs_as_nobody_special(images: dict[str, Image], service: str) -> None:
    config: Mapping[str, Any] = images[service].config
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
    assert (labels["title"], labels["version"]) == (f"wadiloco-{service}", version)
    assert config["Entrypoint"] == ["wadiloco", service]
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["StopSignal"] == "SIGTERM"
    user, _ = images[service].user
    assert user.isdigit()
    assert int(user) != 0


@pytest.mark.parametrize("service", SERVICES)
def test_no_index_and_no_tool_of_the_build_is_left(images: dict[str, Image], service: str) -> None:
    image = images[service]
    assert not [name for name in image.environment if name.startswith("PIP_")]
    assert not any((image.root / name).exists() for name in ("etc/pip.conf", "tools", "src", "own"))


@pytest.mark.parametrize("service", SERVICES)
def test_its_user_can_write_nothing_but_state_and_scratch(images: dict[str, Image], service: str) -> None:
    found = images[service].run("find", "/", "-xdev", "-writable", "-not", "-type", "l")
    writable = {path for path in found.stdout.splitlines() if not path.startswith(("/dev", "/proc", "/sys"))}
    assert writable == {STATE, "/tmp", "/var/tmp", "/run/lock"}  # noqa: S108


@pytest.mark.parametrize("service", SERVICES)
def test_the_service_starts_without_torch_in_the_image(images: dict[str, Image], service: str) -> None:
    absent = ("torch", "numpy", "vllm", "pip", "setuptools")
    program = f"import importlib.util as u; print([name for name in {absent} if u.find_spec(name)])"
    assert images[service].run("python3", "-c", program).stdout.strip() == "[]"
    assert images[service].run("wadiloco", service, "--help").returncode == 0


@pytest.mark.parametrize("service", SERVICES)
def test_it_is_confined_and_ends_cleanly_on_sigterm_as_process_1(host: Host, service: str) -> None:
    settings = {"VLLM": "http://127.0.0.1:9", "GATE": GATE} if service == "sidecar" else {}
    container = host.start(service, **settings)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{container.pid}/status").read_text().splitlines())
    user, _ = container.image.user
    assert set(status["Uid"].split()) == {user}
    assert (status["NSpid"].split()[-1], status["NoNewPrivs"].strip()) == ("1", "1")
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert "Read-only file system" in container.execute("touch", "/opt/wadiloco/x").stderr

    check = container.image.config["Healthcheck"]["Test"][1:]
    assert container.execute(*check).returncode == 0
    os.kill(container.pid, signal.SIGTERM)
    assert container.child.process.wait(STOP_DEADLINE_S) == 0, container.child.log_tail()
    kept = host.state(service) / KEPT[service]
    assert kept.exists() or service == "sidecar"  # one that saw no server has learned nothing


@pytest.mark.parametrize("service", SERVICES)
def test_beyond_loopback_it_wants_a_token(images: dict[str, Image], service: str) -> None:
    needed = ("--vllm", "http://127.0.0.1:9") if service == "sidecar" else ()
    done = images[service].run(*images[service].config["Entrypoint"], *needed)
    assert done.returncode == 2
    assert "token is not set" in done.stderr


@pytest.mark.vllm
def test_both_work_beside_a_live_server(host: Host, vllm_url: str) -> None:
    host.start("controller")
    sidecar = host.start(
        "sidecar", VLLM=vllm_url, CONTROLLER=host.url("controller"), GATE=GATE, NODE="node-0", SCRAPE_INTERVAL_S="0.2"
    )

    def ready() -> Load | None:
        load = Load.model_validate_json(host.get("sidecar", "/v1/load").text)
        return load if load.state is EngineState.READY and load.gate is not None else None

    def known() -> Fleet | None:
        fleet = Fleet.model_validate_json(host.get("controller", "/v1/fleet").text)
        return fleet if fleet.servers and fleet.num_unknown == 0 else None

    gate = eventually(ready, what="a server that is ready").gate
    assert gate is not None
    assert gate.error is None
    assert (host.gate / "gate").stat().st_uid == int(sidecar.image.user[0])
    (server,) = eventually(known, what="samples at the controller").servers
    assert (server.node, server.sample.state) == ("node-0", EngineState.READY)
    assert host.get("sidecar", "/v1/load", token="another").status_code == 401  # noqa: S106
    os.kill(sidecar.pid, signal.SIGTERM)
    assert sidecar.child.process.wait(STOP_DEADLINE_S) == 0, sidecar.child.log_tail()
    assert (host.state("sidecar") / KEPT["sidecar"]).stat().st_uid == int(sidecar.image.user[0])


def test_the_plugin_goes_into_a_servers_image_and_may_write_the_gate(
    storage: Storage, build_options: tuple[str, ...], tmp_path: Path
) -> None:
    # In the server's place an image with the same means: a python3 with pip in an environment of its own.
    server = tmp_path / "Dockerfile"
    server.write_text(f"FROM {BASE_IMAGE}\nRUN python3 -m venv /opt/venv\nENV PATH=/opt/venv/bin:/usr/bin:/bin\n")
    storage.build("localhost/server", server, tmp_path)
    image = storage.build(
        "localhost/vllm-wadiloco",
        DOCKER / "vllm-plugin.Dockerfile",
        ROOT / "sidecar" / "vllm_plugin",
        *("--build-arg", "VLLM_IMAGE=localhost/server", *build_options),
    )
    program = (
        "import importlib.metadata as m, os, wadiloco_vllm_plugin as p; p.InFlightMiddleware(None);"
        "print(*(e.value for e in m.entry_points(group='vllm.stat_logger_plugins')));"
        f"print(os.stat('{GATE}/gate').st_uid)"
    )
    done = image.run("python3", "-c", program)
    assert done.stdout.split() == ["wadiloco_vllm_plugin.stat_logger:WadilocoStatLogger", image.user[0]], done.stderr
