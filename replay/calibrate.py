"""``wadiloco calibrate``: a first calibration from recorded data, for ``wadiloco sidecar --calibration``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator
from rich import box
from rich.console import Console
from rich.table import Table

from replay.recorded import count_journal, count_requests
from replay.requests_file import REQUESTS
from replay.summary import read_json
from service.errors import ConfigError, InputError
from service.files import check_replaceable
from service.log import configure_logging
from service.settings import Settings, load_settings
from sidecar.calibration_file import CalibrationFile, CalibrationSource, write_calibration
from sidecar.calibrator import BINS, Calibrator, Phase
from sidecar.learned import load_learned, objective_text
from sidecar.slo import Slo, parse_slo

SUMMARY, RUNS = "summary.json", "runs"
JOURNAL = "journal.sqlite"
ENOUGH_REQUESTS = 100.0
"""With fewer requests in a phase its estimates are mostly the prior, and the command says so."""


class CalibrateSettings(Settings):
    """Count recorded requests by load and by what the trainer did, and write what they say about SLO violations."""

    service: ClassVar[str] = "calibrate"

    replay: tuple[Path, ...] = ()
    """Output folder of wadiloco replay (repeat for more), judged by its objective: the samples of runs with
    training, the requests of those without."""
    journal: tuple[Path, ...] = ()
    """Journal of a controller (repeat for more); needs --slo, the objective that its sidecars had."""
    state_file: tuple[Path, ...] = ()
    """State file of a sidecar (repeat for more)."""
    slo: str | None = None
    """Objective that the data are about, such as e2e:300ms; replays and state files say it themselves."""
    server_id: str | None = None
    """Count the samples of this server alone; by default those of all."""
    out: Path = Path("calibration.json")
    """File to write."""
    as_json: bool = False
    """Print the result as JSON instead of a table; --json for short."""

    @field_validator("out")
    @classmethod
    def _check_out(cls, path: Path) -> Path:
        check_replaceable(path)
        return path

    @field_validator("slo")
    @classmethod
    def _check_slo(cls, text: str | None) -> str | None:
        try:
            return None if text is None else objective_text(parse_slo(text))
        except InputError as exc:
            raise ValueError(f"{exc.message}: {exc.remedy}") from exc


def main(argv: Sequence[str]) -> int:
    settings = load_settings(CalibrateSettings, argv)
    configure_logging(settings.log_level)
    calibrator = Calibrator()
    content = calibrate(settings, calibrator, now_s=time.time())
    write_calibration(settings.out, content)
    if settings.as_json:
        sys.stdout.write(json.dumps(as_document(content, calibrator, settings.out), indent=2) + "\n")
    else:
        show(content, calibrator, settings.out, Console())
    return 0


def calibrate(settings: CalibrateSettings, calibrator: Calibrator, *, now_s: float) -> CalibrationFile:
    """Count everything that the settings name into ``calibrator``.

    Raises:
        ConfigError: nothing to count, or no objective.
        InputError: a file that is not what it should be, data about different objectives, or not one request.
    """
    if not (settings.replay or settings.journal or settings.state_file):
        raise ConfigError(
            "there is nothing to count", field="replay", remedy="give --replay DIR, --journal FILE or --state-file FILE"
        )
    objectives = {"--slo": settings.slo} if settings.slo else {}
    files: list[tuple[Path, Slo | None]] = [(path, None) for path in settings.journal]
    for directory in settings.replay:
        stated = _objective_of(directory)
        objectives[str(directory)] = objective_text(stated)
        files += [(path, stated) for path in _files_of(directory)]
    sources = [_count_state(path, calibrator, objectives, settings) for path in settings.state_file]
    about = _one_objective(objectives)
    servers: set[str] = set()
    for path, slo in files:
        source, seen = _count_file(path, calibrator, slo, server_id=settings.server_id)
        sources.append(source)
        servers |= seen
    if not any(calibrator.num_requests(phase) for phase in Phase):
        raise _nothing_judged(settings, servers)
    return CalibrationFile(made_at_s=now_s, slo=about, sources=tuple(sources), calibration=calibrator.export())


def _objective_of(directory: Path) -> Slo:
    try:
        summary = read_json(directory / SUMMARY)
    except InputError as exc:
        raise InputError(
            f"{exc.field} {exc.message}", field="replay", remedy="give the --out folder of a wadiloco replay that ran"
        ) from exc
    stated = f"{summary.slo.metric}:{summary.slo.threshold_ms:.10g}ms"
    return parse_slo(str(summary.experiment.settings.get("slo", stated)) if summary.experiment else stated)


def _files_of(directory: Path) -> list[Path]:
    """The journal of each run with training, the requests of each without."""
    found = [
        run / (JOURNAL if (run / JOURNAL).exists() else REQUESTS)
        for run in sorted(directory.glob(f"{RUNS}/*"))
        if (run / JOURNAL).exists() or (run / REQUESTS).exists()
    ]
    if not found:
        raise InputError(
            f"{directory} has no run with a journal or requests",
            field="replay",
            remedy="give the --out folder of this version's wadiloco replay",
        )
    return found


def _count_file(
    path: Path, calibrator: Calibrator, slo: Slo | None, *, server_id: str | None
) -> tuple[CalibrationSource, frozenset[str]]:
    """Count one file; what it gave, and the servers in it."""
    kind: Literal["journal", "requests"] = "requests" if path.name == REQUESTS and slo is not None else "journal"
    if kind == "requests" and slo is not None:
        counted = count_requests(path, calibrator, slo, server_id=server_id)
    else:
        counted = count_journal(path, calibrator, server_id=server_id)
    source = CalibrationSource(path=str(path), kind=kind, intervals=counted.intervals, requests=counted.requests)
    return source, counted.servers


def _count_state(
    path: Path, calibrator: Calibrator, objectives: dict[str, str], settings: CalibrateSettings
) -> CalibrationSource:
    learned = load_learned(path)
    if settings.server_id is not None and learned.server_id != settings.server_id:
        raise InputError(
            f"{path} is about server {learned.server_id}, not {settings.server_id}",
            field="state_file",
            remedy="leave it out, or --server-id",
        )
    if learned.slo is not None:
        objectives[str(path)] = learned.slo
    try:
        calibrator.absorb(learned.calibration)
    except ValueError as exc:
        raise InputError(f"{path}: {exc}", field="state_file", remedy="use the version that wrote it") from exc
    requests = sum(sum(counts) for counts in learned.calibration.requests.values())
    return CalibrationSource(path=str(path), kind="state", intervals=0, requests=requests)


def _one_objective(objectives: dict[str, str]) -> str:
    if not objectives:
        raise ConfigError(
            "the data do not say which objective they were judged by",
            field="slo",
            remedy="set --slo to that of the sidecars, such as e2e:300ms",
        )
    if len(set(objectives.values())) > 1:
        listed = ", ".join(f"{where} {slo}" for where, slo in objectives.items())
        raise InputError(
            f"the data are about different objectives: {listed}", field="slo", remedy="calibrate for each on its own"
        )
    return next(iter(objectives.values()))


def _nothing_judged(settings: CalibrateSettings, servers: set[str]) -> InputError:
    if settings.server_id is not None and servers:
        return InputError(
            f"no sample is about server {settings.server_id}",
            field="server_id",
            remedy=f"name one of {', '.join(sorted(servers))}",
        )
    return InputError(
        "not one request was judged in these data",
        field="replay" if settings.replay else "journal" if settings.journal else "state_file",
        remedy="record for longer, under traffic",
    )


def as_document(content: CalibrationFile, calibrator: Calibrator, path: Path) -> dict[str, Any]:
    """For machines: the file's name, its sources, and the curve of each phase."""
    return {
        "out": str(path),
        "slo": content.slo,
        "sources": [source.model_dump() for source in content.sources],
        "phases": {
            phase.value: [
                {"load_from": low, "load_below": high, **estimate._asdict()}
                for (low, high), estimate in zip(BINS, calibrator.curve(phase), strict=True)
            ]
            for phase in Phase
        },
        "too_few": [phase.value for phase in Phase if calibrator.num_requests(phase) < ENOUGH_REQUESTS],
    }


def show(content: CalibrationFile, calibrator: Calibrator, path: Path, console: Console) -> None:
    """A table per phase, up to the highest load that any phase has seen."""
    curves = {phase: calibrator.curve(phase) for phase in Phase}
    seen = [i for i in range(len(BINS)) if any(curve[i].requests > 0 for curve in curves.values())]
    for phase in Phase:
        num = calibrator.num_requests(phase)
        table = Table(
            title=f"{phase.value}: {num:.0f} requests, {content.slo}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for name in ("load", "requests", "P(violation)", "90 % interval"):
            table.add_column(name, justify="right")
        for (low, high), estimate in list(zip(BINS, curves[phase], strict=True))[: max(seen) + 1]:
            table.add_row(
                f"{low:g}+" if high is None else f"{low:g} to <{high:g}",
                f"{estimate.requests:.0f}",
                f"{estimate.probability:.3f}",
                f"{estimate.low:.3f} to {estimate.high:.3f}",
            )
        console.print(table)
        if num < ENOUGH_REQUESTS:
            console.print(f"{phase.value}: too few requests, these are mostly assumptions", highlight=False)
    console.print(f"\n  {path}", highlight=False, soft_wrap=True)
    console.print(f"  wadiloco sidecar --slo {content.slo} --calibration {path} …", highlight=False, soft_wrap=True)
