"""``chaos.json`` and the report: what each fault cost, and what is left of the run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from replay.summary import Machine
from service.errors import UnavailableError
from service.files import replace_file


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Outcome(StrEnum):
    RECOVERED = "recovered"
    HANG = "hang"
    """Not over within ``recover_within_s``: a human would have to look after it."""
    MISSED = "missed"
    """It could not be injected; see ``detail``."""


class FaultRecord(_Part):
    """One fault. Times are seconds since the watch began; what was not seen is None."""

    kind: str
    target: str
    """Role, slot and rank."""
    outcome: Outcome
    slot: int | None = None
    """None where it was no slot's process."""
    pid: int | None = None
    at_step: int | None = None
    """Furthest step of the slot when it was injected."""
    injected_s: float | None = None
    undone_s: float | None = None
    """When it was taken back, where it lasted."""
    detected_s: float | None = None
    """When somebody else showed that it was noticed; None where nobody had to."""
    answers_again_s: float | None = None
    """When a controller or synchronizer answered again."""
    trains_again_s: float | None = None
    """First step beyond all that the slot had shown before; of a controller or synchronizer, of all slots since it
    answers again."""
    detect_after_s: float | None = None
    recover_after_s: float | None = None
    """From the injection until it trains again."""
    steps_lost: int = 0
    others_gap_s: float | None = None
    """Longest time between two steps of any other island, from the injection until it was over."""
    others_normal_gap_s: float | None = None
    """The same of an equally long time before, as far as nothing disturbed it."""
    detail: str = ""


class ProcessMemory(_Part):
    """Resident memory of one process, in MiB."""

    name: str
    first_mb: float
    last_mb: float
    max_mb: float
    growth_mb_per_min: float | None
    """Once it has started; None of one that lived for less than half a minute."""


class ChaosSummary(_Part):
    wadiloco_version: str
    command: str
    settings: dict[str, object]
    machine: Machine
    generated_at: str
    planned: int
    interrupted: bool
    """Ended before the plan was carried out: by a signal, or since a fault was not over."""
    faults: tuple[FaultRecord, ...]
    num_injected: int
    num_recovered: int
    num_hangs: int
    num_missed: int
    restarts: dict[str, int]
    """How often each process was started again by the one that keeps the fleet up."""
    wall_s: float
    """From the first step of the last slot to the end."""
    goodput_frac: float
    """Share of it in which steps counted, mean over the slots."""
    steps: dict[int, int]
    """Furthest step of each slot."""
    steps_lost: int
    rounds_closed: int | None
    first_loss: float | None
    final_loss: float | None
    """Mean over the slots."""
    memory: tuple[ProcessMemory, ...]

    @property
    def passed(self) -> bool:
        """Whether everything that was injected is over, and anything was."""
        return self.num_hangs == 0 and self.num_injected > 0 and not self.interrupted


def write_text(path: Path, text: str) -> None:
    """Raises `UnavailableError` when there is no space or no permission."""
    try:
        replace_file(path, [text.encode()])
    except OSError as exc:
        raise UnavailableError(
            f"cannot write {path}: {exc.strerror or exc}", field="out", remedy="free space or choose another --out"
        ) from exc


def render_report(summary: ChaosSummary) -> str:
    """The result in Markdown."""
    verdict = "Everything recovered." if summary.passed else "Not everything recovered, or not all was tried."
    loss = "-" if summary.final_loss is None else f"{_number(summary.first_loss)} to {summary.final_loss:.3f}"
    lines = [
        "# Chaos",
        "",
        f"{verdict} {summary.num_injected} of {summary.planned} faults injected: {summary.num_recovered} recovered,"
        f" {summary.num_hangs} hangs, {summary.num_missed} missed.",
        "",
        f"- goodput {100 * summary.goodput_frac:.1f} % of {summary.wall_s:.0f} s; {summary.steps_lost} steps lost;"
        f" {'-' if summary.rounds_closed is None else summary.rounds_closed} rounds; loss {loss}",
        f"- steps: {', '.join(f'slot {slot} {step}' for slot, step in sorted(summary.steps.items()))}",
        f"- started again: {', '.join(f'{name} {n}' for name, n in summary.restarts.items() if n) or 'nothing'}",
        "",
        "| fault | target | outcome | at step | detected after s | trains again after s | steps lost |"
        " others' gap s (normal) | detail |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(fault) for fault in summary.faults),
        "",
        "| process | first MiB | last MiB | most MiB | growth MiB/min |",
        "|---|---|---|---|---|",
        *(
            f"| {one.name} | {one.first_mb:.0f} | {one.last_mb:.0f} | {one.max_mb:.0f} |"
            f" {_number(one.growth_mb_per_min)} |"
            for one in summary.memory
        ),
        "",
        f"{summary.machine.cpu_count} cores ({summary.machine.cpu_model or 'unknown'}), wadiloco"
        f" {summary.wadiloco_version}, {summary.generated_at}: `{summary.command}`",
        "",
    ]
    return "\n".join(lines)


def _row(fault: FaultRecord) -> str:
    gap = f"{_number(fault.others_gap_s)} ({_number(fault.others_normal_gap_s)})"
    cells = [
        *(fault.kind, fault.target, fault.outcome, "-" if fault.at_step is None else str(fault.at_step)),
        *(_number(fault.detect_after_s), _number(fault.recover_after_s), str(fault.steps_lost), gap),
        fault.detail.replace("|", "/").replace("\n", " "),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
