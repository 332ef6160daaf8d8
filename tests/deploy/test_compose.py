"""The compose file: every setting in it is one that the service knows, and everything that it names is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from controller.config import ControllerSettings
from service.settings import ServiceSettings, load_settings
from sidecar.config import SidecarSettings
from tests.conftest import ROOT

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: make install")

DOCKER = ROOT / "deploy" / "docker"
SERVICES: dict[str, type[ServiceSettings]] = {"sidecar": SidecarSettings, "controller": ControllerSettings}
OURS = tuple(SERVICES)
VARIABLE = re.compile(r"\$\{(?P<name>[A-Z_]+)(?P<operator>:-|:\?)(?P<rest>[^}]*)\}")
SECRETS = "/run/secrets"


def compose(**given: str) -> dict[str, Any]:
    """The file as compose reads it: a variable that must be set and is not is an error."""

    def value_of(match: re.Match[str]) -> str:
        name, operator, rest = match["name"], match["operator"], match["rest"]
        assert operator == ":-" or name in given, f"{name} is not set: {rest}"
        return given.get(name, rest)

    document: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value_of, (DOCKER / "docker-compose.yml").read_text()))
    return document


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose(WADILOCO_MODEL="a-model")["services"]
    return found


def image_defaults(target: str) -> dict[str, str]:
    """What the image's stage sets by ENV."""
    stage = (DOCKER / "Dockerfile").read_text().partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    return dict(re.findall(r"(WADILOCO_[A-Z_]+)=(\S+)", stage))


def test_it_asks_for_the_model() -> None:
    with pytest.raises(AssertionError, match="WADILOCO_MODEL is not set: name the model"):
        compose()


@pytest.mark.parametrize("name", OURS)
def test_the_service_starts_from_what_image_and_compose_file_set(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = services()[name]
    (tmp_path / "token.toml").write_text('token = "secret"\n')
    settings = image_defaults(name) | {key: text for key, text in service["environment"].items() if text is not None}
    for key, text in settings.items():
        monkeypatch.setenv(key, str(text).replace("/var/lib/wadiloco", str(tmp_path)))
    assert [f"{SECRETS}/{secret}" for secret in service["secrets"]] == service["command"][1:]
    arguments = [argument.replace(SECRETS, str(tmp_path)) for argument in service["command"]]
    loaded = load_settings(SERVICES[name], arguments)
    assert (loaded.host, loaded.token is not None) == ("0.0.0.0", True)  # noqa: S104
    assert [str(loaded.port)] == [port.rpartition(":")[2] for port in service["ports"]]


@pytest.mark.parametrize("name", OURS)
def test_a_variable_without_a_value_is_a_setting_too(name: str) -> None:
    prefix = f"WADILOCO_{name.upper()}_"
    for variable in services()[name]["environment"]:
        assert variable.removeprefix(prefix).lower() in SERVICES[name].model_fields


@pytest.mark.parametrize("name", ["vllm", *OURS])
def test_every_container_is_confined_and_watched(name: str) -> None:
    service = services()[name]
    user, _, group = service["user"].partition(":")
    assert int(user) != 0
    assert group.isdigit()
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert service.get("read_only", False) is (name != "vllm")
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])  # noqa: S108
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert "healthcheck" in service or f'healthcheck.py", "{name}"]' in dockerfile


def test_what_is_named_is_there() -> None:
    document = compose(WADILOCO_MODEL="a-model")
    for name, service in document["services"].items():
        build: Mapping[str, str] = service["build"]
        context = (DOCKER / build["context"]).resolve()
        dockerfile = context / build["dockerfile"]
        assert f" AS {build['target']}\n" in dockerfile.read_text() if "target" in build else dockerfile.is_file()
        assert set(service.get("depends_on", {})) <= set(document["services"]) - {name}
        volumes = {mount.partition(":")[0] for mount in service["volumes"]}
        assert volumes <= set(document["volumes"])
    assert {secret for name in OURS for secret in document["services"][name]["secrets"]} == set(document["secrets"])


def test_server_and_sidecar_are_one_user_and_share_one_gate() -> None:
    document = compose(WADILOCO_MODEL="a-model", WADILOCO_USER_ID="4711")
    vllm, sidecar = document["services"]["vllm"], document["services"]["sidecar"]
    place = sidecar["environment"]["WADILOCO_SIDECAR_GATE"]
    assert vllm["environment"]["WADILOCO_GATE_DIR"] == place
    assert f"gate:{place}" in vllm["volumes"]
    assert f"gate:{place}" in sidecar["volumes"]
    assert vllm["user"] == sidecar["user"] == "4711:0"
    assert "uid=4711" in document["volumes"]["gate"]["driver_opts"]["o"]
    middleware = vllm["command"][vllm["command"].index("--middleware") + 1]
    assert middleware == "wadiloco_vllm_plugin.InFlightMiddleware"
