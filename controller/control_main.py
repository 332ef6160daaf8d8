"""``wadiloco control``: an operator's order to a running controller."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

import httpx
from pydantic import Field, ValidationError

from controller.schema import ControlAction, ControlReply, ControlRequest, ControlWhen
from diloco.schema import Slot
from service.client import refusal
from service.errors import ConfigError, UnavailableError
from service.leader import ask_leader
from service.log import configure_logging
from service.peers import split_urls
from service.settings import PeerSettings, Urls, load_settings
from sidecar.schema import Name

COMMANDS = {action.replace("_", "-"): action for action in ControlAction}
FLAGS = frozenset({"--dry-run", "--no-dry-run", "--json", "--as-json", "--no-as-json", "--print-config", "--help"})


class ControlSettings(PeerSettings):
    """Give a running controller an order: wadiloco control pause|resume|sync-now|drain|swap [options].

    pause and sync-now are about the whole run; resume too, or about drained agents; drain and swap about those named.
    """

    service: ClassVar[str] = "control"

    controller: Urls = "http://127.0.0.1:9500"
    """URL of the controller, or several with commas: the one that leads is asked."""
    agent_id: Name | None = None
    """Agent that it is about."""
    slot: Slot | None = None
    """Slot whose holder it is about."""
    node: Name | None = None
    """Host whose agents it is about."""
    to_agent: Name | None = None
    """For swap: the spare that takes the slot; by default the one that waits longest."""
    when: ControlWhen = ControlWhen.AFTER_SYNC
    """For drain and swap: after_sync loses no inner step, now does not wait."""
    dry_run: bool = False
    """Say what would happen, and change nothing."""
    timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Longest wait for the answer."""
    as_json: bool = False
    """Print the answer as JSON; --json for short."""


def main(argv: Sequence[str]) -> int:
    action, options = _split_action(argv)
    settings = load_settings(ControlSettings, options)
    configure_logging(settings.log_level)
    if action is None:
        raise ConfigError("no order is given", field="ACTION", remedy=f"one of {', '.join(COMMANDS)}")
    reply = send(settings, build_request(settings, action))
    if settings.as_json:
        sys.stdout.write(reply.model_dump_json(indent=2) + "\n")
    else:
        sys.stdout.write(f"{'would be: ' if reply.dry_run else ''}{reply.effect}\n")
    return 0


def _split_action(argv: Sequence[str]) -> tuple[ControlAction | None, list[str]]:
    """The one word that is no option and no option's value; ``--help`` and ``--print-config`` need none."""
    words = [at for at in range(len(argv)) if not argv[at].startswith("-") and not _takes_value(argv[at - 1 : at])]
    if not words:
        return None, list(argv)
    at = words[0]
    action = COMMANDS.get(argv[at])
    if action is None:
        raise ConfigError(f"no such order: {argv[at]}", field="ACTION", remedy=f"one of {', '.join(COMMANDS)}")
    return action, [*argv[:at], *argv[at + 1 :]]


def _takes_value(before: Sequence[str]) -> bool:
    """Whether the next word belongs to this option."""
    return any(word.startswith("--") and "=" not in word and word not in FLAGS for word in before)


def build_request(settings: ControlSettings, action: ControlAction) -> ControlRequest:
    fields = {name: getattr(settings, name) for name in ControlRequest.model_fields if name != "action"}
    try:
        return ControlRequest.model_validate({"action": action, **fields})
    except ValidationError as exc:
        raise ConfigError(str(exc.errors()[0]["msg"]).removeprefix("Value error, "), field="slot") from exc


def send(settings: ControlSettings, request: ControlRequest) -> ControlReply:
    """Raises the error of the tree that the controller's refusal stands for."""
    body = request.model_dump(mode="json", exclude_none=True)
    urls = split_urls(settings.controller)
    try:
        with ask_leader(
            settings, urls, "POST", "/v1/control", timeout_s=settings.timeout_s, field="controller", json=body
        ) as response:
            response.read()
        if response.is_error:
            raise refusal(response, field="controller")
        return ControlReply.model_validate(response.json())
    except httpx.HTTPError as exc:
        raise UnavailableError(f"{type(exc).__name__}: {exc}", field="controller") from exc
    except ValueError as exc:
        raise UnavailableError(f"{settings.controller} gave no answer of a controller", field="controller") from exc
