"""``wadiloco switchback``: compare two policies in turns on the running fleet.

The controller runs the experiment; this command starts it, shows how it goes and prints its result. It may be ended
and followed again (``--attach``). Ctrl-C asks whether to stop the experiment; where nobody can be asked it stops it.
Exit code 0 when the experiment came to its end, 1 when somebody else stopped it, 130 after Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import httpx
from pydantic import Field, model_validator
from rich.console import Console

from controller.lab_schema import ExperimentSpec, ExperimentState, ExperimentStatus
from controller.policy_words import parse_policy
from controller.schema import MAX_BUDGET_S
from controller.switchback_view import ProgressView, show
from service.client import refusal
from service.errors import ConflictError, InputError, UnavailableError, WadilocoError
from service.leader import ask_leader
from service.log import configure_logging
from service.peers import split_urls
from service.settings import PeerSettings, Urls, load_settings

STOPPED_BY_OTHERS = 1
PATIENCE_S = 600.0
"""How long the controller may be away, for a restart or an update, before the command gives up."""
TIMEOUT_S = 10.0


class SwitchbackSettings(PeerSettings):
    """Compare two policies in turns on the running fleet, with equal sync budgets in blocks of equal length."""

    service: ClassVar[str] = "switchback"

    log_level: str = Field(default="error", pattern="^(debug|info|warning|error)$")
    """debug, info, warning or error."""
    controller: Urls = "http://127.0.0.1:9500"
    """Base URL of the controller, or several with commas: the one that leads is asked."""
    policy_a: str = "wa_diloco"
    """One policy: NAME or NAME:PARAM=VALUE:..., for example fixed_h:h=256."""
    policy_b: str = "random_deferral"
    """The other one; random_deferral draws anew in each pair of blocks."""
    blocks: int = Field(default=16, ge=2, le=400)
    """Number of blocks, even; six pairs are the least that can show a difference."""
    block_s: float = Field(default=600.0, ge=1, le=7 * 86400)
    """Seconds of one block."""
    washout_s: float = Field(default=60.0, ge=0)
    """Seconds at the start of each block without syncs, that do not count: as long as the longest request."""
    syncs_per_block: int = Field(default=1, ge=1, le=10_000)
    """Outer syncs that each block may spend."""
    min_gap_s: float = Field(default=0.0, ge=0, le=MAX_BUDGET_S)
    """Least seconds between the starts of two syncs."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the order of the blocks."""
    attach: int | None = Field(default=None, ge=1)
    """Number of an experiment to follow, instead of starting one."""
    poll_s: float = Field(default=2.0, ge=0.05, le=60)
    """Seconds between two looks at the controller."""
    as_json: bool = False
    """Print the experiment with its result as JSON; --json for short. Progress goes to standard error."""

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        try:
            self.spec  # noqa: B018
        except InputError as exc:
            raise ValueError(str(exc)) from exc
        return self

    @property
    def spec(self) -> ExperimentSpec:
        return ExperimentSpec(
            a=parse_policy(self.policy_a, field="policy_a"),
            b=parse_policy(self.policy_b, field="policy_b"),
            blocks=self.blocks,
            block_s=self.block_s,
            washout_s=self.washout_s,
            syncs_per_block=self.syncs_per_block,
            min_gap_s=self.min_gap_s,
            seed=self.seed,
        )


def main(argv: Sequence[str]) -> int:
    settings = load_settings(SwitchbackSettings, argv)
    configure_logging(settings.log_level)
    # What a service manager or CI sends means the same as Ctrl-C: say what is left running. A shell's background job
    # has SIGINT ignored, and whoever sends it all the same means it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    peer = Peer(settings)
    status = peer.start(settings.spec) if settings.attach is None else peer.look(settings.attach)
    console = Console(stderr=settings.as_json)
    status = follow(peer, status, settings, console)
    if settings.as_json:
        sys.stdout.write(status.model_dump_json(indent=2) + "\n")
    else:
        show(status, console)
    return 0 if status.state is ExperimentState.DONE else STOPPED_BY_OTHERS


class Peer:
    """The controller's experiments over HTTP."""

    def __init__(self, settings: SwitchbackSettings) -> None:
        self._settings = settings
        self._urls = split_urls(settings.controller)

    def start(self, spec: ExperimentSpec) -> ExperimentStatus:
        return self._ask("POST", "/v1/experiments", json=spec.model_dump(mode="json"))

    def look(self, number: int) -> ExperimentStatus:
        return self._ask("GET", f"/v1/experiments/{number}")

    def stop(self, number: int) -> ExperimentStatus:
        return self._ask("DELETE", f"/v1/experiments/{number}")

    def _ask(self, method: str, path: str, **body: Any) -> ExperimentStatus:
        """Raises `InputError`, `ConflictError` or `UnavailableError`, as the controller answers or does not."""
        try:
            with ask_leader(
                self._settings, self._urls, method, path, timeout_s=TIMEOUT_S, field="--controller", **body
            ) as response:
                response.read()
        except httpx.HTTPError as exc:
            raise UnavailableError(
                f"no answer from {self._settings.controller}: {exc or type(exc).__name__}",
                field="--controller",
                remedy="start the controller, or give its URL",
            ) from exc
        if not response.is_success:
            raise _in_options(refusal(response, field="--controller"))
        return ExperimentStatus.model_validate_json(response.content)


def _in_options(error: WadilocoError) -> WadilocoError:
    """A refusal in the words of this command."""
    first, *rest = (error.field or "").split(".")
    if first == "number":
        return type(error)(error.message, field="attach", remedy="see GET /v1/experiments of the controller")
    if first not in {"a", "b"}:
        return error
    message = f"{rest[1]}: {error.message}" if rest[1:] else error.message
    return type(error)(message, field=f"policy_{first}", remedy=error.remedy)


def follow(peer: Peer, status: ExperimentStatus, settings: SwitchbackSettings, console: Console) -> ExperimentStatus:
    """Show progress until the experiment is over.

    Raises:
        UnavailableError: the controller stayed away.
        KeyboardInterrupt: after saying what became of the experiment.
    """
    away_since_s: float | None = None
    try:
        with ProgressView(console, status) as view:
            while status.state is ExperimentState.RUNNING:
                time.sleep(settings.poll_s)
                try:
                    status, away_since_s = peer.look(status.id), None
                except UnavailableError as exc:
                    away_since_s = away_since_s or time.monotonic()
                    if time.monotonic() - away_since_s > PATIENCE_S:
                        raise UnavailableError(
                            f"{exc.message}; experiment {status.id} goes on when the controller does",
                            field=exc.field,
                            remedy=f"follow it again with --attach {status.id}",
                        ) from exc
                    view.away(exc.message)
                else:
                    view.show(status)
    except KeyboardInterrupt:
        _interrupted(peer, status, settings)
        raise
    return status


def _interrupted(peer: Peer, status: ExperimentStatus, settings: SwitchbackSettings) -> None:
    """Stop the experiment, or leave it, and say what goes on."""
    number, policy = status.id, status.policy_after.label
    goes_on = (
        f"experiment {number} goes on at {settings.controller}: follow it with --attach {number},"
        f" stop it with DELETE {settings.controller}/v1/experiments/{number}"
    )
    if not _wants_stop(number, policy):
        sys.stderr.write(f"{goes_on}\n")
        return
    try:
        peer.stop(number)
    except (InputError, ConflictError, UnavailableError) as exc:
        sys.stderr.write(f"it could not be stopped: {exc}\n{goes_on}\n")
    else:
        sys.stderr.write(f"experiment {number} is stopped, policy {policy} and its budget are back\n")


def _wants_stop(number: int, policy: str) -> bool:
    if not sys.stdin.isatty():
        return True
    sys.stderr.write(f"\nstop experiment {number}, and put policy {policy} back? [Y/n] ")
    sys.stderr.flush()
    try:
        return not sys.stdin.readline().strip().lower().startswith("n")
    except KeyboardInterrupt:
        return False  # Asked again: whoever wants out at once wants no more done.
