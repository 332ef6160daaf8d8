"""The front door: ``wadiloco COMMAND …`` loads the package of that command and nothing else.

A sidecar or controller host therefore needs no torch, and ``wadiloco --help`` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from service.errors import WadilocoError
from service.extras import EXTRAS, missing_package
from service.output import guarded_output


class Command(NamedTuple):
    module: str
    extra: str | None
    summary: str
    settings: str | None = None
    """Class of its settings, ``module:name``, where the module itself cannot be loaded without the extra."""


COMMANDS: dict[str, Command] = {
    "sidecar": Command("sidecar.main", None, "watch one vLLM server: load, forecast, SLO accounts"),
    "controller": Command("controller.main", None, "decide when islands sync: registry, policy, budget, journal"),
    "export": Command("controller.export.main", None, "a table of a run as CSV or Parquet, for BI tools"),
    "control": Command("controller.control_main", None, "pause, resume, sync now, drain, swap; with --dry-run"),
    "synchronizer": Command(
        "diloco.synchronizer.main",
        "train",
        "hold the global parameters and take outer steps",
        "diloco.synchronizer.config:SynchronizerSettings",
    ),
    "island": Command("diloco.agent.main", "train", "train beside a server: agent and rank worker of one island"),
    "replay": Command(
        "replay.main",
        "replay",
        "replay a traffic trace under each policy and compare",
        "replay.config:ReplaySettings",
    ),
    "simulate": Command(
        "replay.simulate",
        "replay",
        "the same comparison on a virtual clock, in seconds, without servers",
        "replay.simulate_config:SimulateSettings",
    ),
    "calibrate": Command("replay.calibrate", None, "SLO violations by load and phase, from recorded traffic"),
    "switchback": Command("controller.switchback_main", None, "compare two policies in turns on the running fleet"),
    "chaos": Command(
        "replay.chaos.main",
        "replay",
        "break a training fleet of this machine on purpose, and tell what each fault cost",
        "replay.chaos.config:ChaosSettings",
    ),
    "doctor": Command("sidecar.doctor", None, "look at a vLLM server and say what to change"),
    "demo": Command(
        "replay.demo",
        "replay",
        "the whole loop on this machine: two vLLM servers, two islands",
        "replay.config:DemoSettings",
    ),
}
HELP = frozenset({"-h", "--help"})
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    2 bad input, 3 something needed is missing or the output cannot be written, 4 a conflict, 130 interrupted, 141 the
    reader of the output left.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0
    with guarded_output() as output:
        code = dispatch(arguments)
    if output.complaint is not None:
        sys.stderr.write(" ".join(["wadiloco", *arguments[:1]]) + f": {output.complaint}\n")
    return code if output.exit_code is None else output.exit_code


def dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in HELP | {"help"}:
        sys.stdout.write(usage())
        return 0
    name, *rest = arguments
    if name in {"-V", "--version"}:
        from service.app import package_version

        sys.stdout.write(f"wadiloco {package_version()}\n")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        sys.stderr.write(f"wadiloco: no such command: {name}\n\n{usage()}")
        return 2
    try:
        return run_command(command, rest)
    except WadilocoError as exc:
        sys.stderr.write(f"wadiloco {name}: {exc}\n")
        return exc.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"wadiloco {name}: interrupted\n")
        return INTERRUPTED


def run_command(command: Command, arguments: Sequence[str]) -> int:
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as exc:
        if command.extra is None or exc.name is None or exc.name.partition(".")[0] not in EXTRAS[command.extra]:
            raise
        if command.settings is not None and HELP & set(arguments):
            show_help(command.settings)
        raise missing_package(exc.name, command.extra) from exc
    code: int = module.main(arguments)
    return code


def show_help(settings: str) -> None:
    """Print the options of a command whose packages are missing, and exit."""
    from service.settings import load_settings

    module, _, name = settings.partition(":")
    load_settings(getattr(importlib.import_module(module), name), ["--help"])


def usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = (f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: wadiloco COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\nwadiloco COMMAND --help tells its options. Each also takes --config FILE (TOML) and --print-config.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
