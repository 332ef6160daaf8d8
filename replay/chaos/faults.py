"""What goes wrong when: faults by plan, or drawn. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from service.errors import InputError

E = TypeVar("E", bound=StrEnum)


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after ``hold_s``."""
    FREEZE = "freeze"
    """SIGSTOP for ever."""
    SLOW = "slow"
    """Stopped for most of each fifth of a second, for ``hold_s``."""
    PARTITION = "partition"
    """No packet in or out, for ``hold_s``."""
    CORRUPT = "corrupt"
    """Some bytes of one of its files are flipped, and it is killed, so that it reads them."""
    DISK = "disk"
    """Its disk is full, for ``hold_s``."""
    MEMORY = "memory"
    """Another process takes the machine's memory, for ``hold_s``."""


class Role(StrEnum):
    WORKER = "worker"
    AGENT = "agent"
    CONTROLLER = "controller"
    SYNCHRONIZER = "synchronizer"


OF_SLOT = frozenset({Role.WORKER, Role.AGENT})
"""Roles of which there is one for each slot."""
PROCESS_KINDS = frozenset({FaultKind.KILL, FaultKind.STOP, FaultKind.FREEZE, FaultKind.SLOW, FaultKind.MEMORY})
POSSIBLE: dict[Role, frozenset[FaultKind]] = {
    # A worker has no address, and no files, of its own: those are its agent's.
    Role.WORKER: PROCESS_KINDS,
    Role.AGENT: frozenset(FaultKind),
    Role.CONTROLLER: frozenset(FaultKind),
    Role.SYNCHRONIZER: frozenset(FaultKind),
}
HELD = frozenset({FaultKind.STOP, FaultKind.SLOW, FaultKind.PARTITION, FaultKind.DISK, FaultKind.MEMORY})
"""Faults that end by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, and when it comes: at a time since the fleet trains, or when a slot has come to a step."""

    kind: FaultKind
    role: Role
    slot: int | None = None
    """None for a process that is no slot's."""
    rank: int | None = None
    """Of a worker."""
    at_s: float | None = None
    at_step: int | None = None
    hold_s: float = 0.0
    seed: int = 0
    """Of what it draws itself: which file, which bytes."""

    @property
    def target(self) -> str:
        """Such as ``worker 1/0`` (slot and rank), ``agent 1`` or ``controller``."""
        place = "" if self.slot is None else f" {self.slot}"
        return f"{self.role}{place}" + ("" if self.rank is None else f"/{self.rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What there is to hit."""

    num_slots: int
    num_ranks: int


def draw_plan(
    seed: int,
    shape: Shape,
    *,
    kinds: Sequence[FaultKind],
    roles: Sequence[Role],
    every_s: float,
    hold_s: float,
    count: int | None = None,
    duration_s: float | None = None,
) -> list[Fault]:
    """Faults at random: each possible pair of kind and role is as likely, gaps are 0.5 to 1.5 times ``every_s``.

    So many, or as many as begin within ``duration_s``; at least one of the two is given.

    Raises:
        InputError: none of the kinds can hit any of the roles.
    """
    pairs = [(kind, role) for kind in kinds for role in roles if kind in POSSIBLE[role]]
    if not pairs:
        raise InputError(
            f"{', '.join(kinds)} cannot hit {', '.join(roles)}", field="kinds", remedy="add targets or other kinds"
        )
    rng = random.Random(f"chaos/{seed}")
    plan: list[Fault] = []
    at_s = 0.0
    while count is None or len(plan) < count:
        at_s += every_s * rng.uniform(0.5, 1.5)
        if duration_s is not None and at_s > duration_s:
            break
        kind, role = rng.choice(pairs)
        # Drawn whether they are needed or not, so that a plan changes little when kinds or targets do.
        slot, rank, own = rng.randrange(shape.num_slots), rng.randrange(shape.num_ranks), rng.randrange(1 << 32)
        plan.append(
            Fault(
                kind=kind,
                role=role,
                slot=slot if role in OF_SLOT else None,
                rank=rank if role is Role.WORKER else None,
                at_s=at_s,
                hold_s=hold_s if kind in HELD else 0.0,
                seed=own,
            )
        )
    return plan


def parse_fault(text: str, shape: Shape, *, hold_s: float, seed: int = 0) -> Fault:
    """``slot=1,step=40,kind=kill,target=worker`` → a fault; also ``time_s``, ``rank``, ``hold_s``, with colons too.

    Raises:
        InputError: naming the part that is wrong.
    """
    parts = dict(_pair(part) for part in re.split("[,:]", text) if part.strip())
    unknown = sorted(parts.keys() - {"slot", "step", "time_s", "kind", "target", "rank", "hold_s"})
    if unknown:
        raise _wrong(text, f"{unknown[0]} is no part of a fault")
    kind = _member(FaultKind, parts.get("kind", "kill"), text)
    role = _member(Role, parts.get("target", "worker"), text)
    if kind not in POSSIBLE[role]:
        raise _wrong(text, f"{kind} cannot hit a {role}")
    slot = _number(parts, "slot", text, below=shape.num_slots)
    rank = _number(parts, "rank", text, below=shape.num_ranks)
    step, time_s = _number(parts, "step", text), _seconds(parts, "time_s", text)
    if (step is None) == (time_s is None):
        raise _wrong(text, "give one of step and time_s")
    if slot is None and (role in OF_SLOT or step is not None):
        raise _wrong(text, "give the slot")
    if rank is not None and role is not Role.WORKER:
        raise _wrong(text, "only workers have ranks")
    held_s = _seconds(parts, "hold_s", text)
    return Fault(
        kind=kind,
        role=role,
        slot=slot,
        rank=(rank or 0) if role is Role.WORKER else None,
        at_s=time_s,
        at_step=step,
        hold_s=(hold_s if held_s is None else held_s) if kind in HELD else 0.0,
        seed=seed,
    )


def in_order(faults: Iterable[Fault]) -> list[Fault]:
    """Those at times first, by time; those at steps keep their order, by step."""
    return sorted(faults, key=lambda fault: (fault.at_s is None, fault.at_s or 0.0, fault.at_step or 0))


def _pair(part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    return name.strip(), value.strip()


def _wrong(text: str, what: str) -> InputError:
    return InputError(f"{text!r}: {what}", field="at", remedy="write slot=1,step=40,kind=kill,target=worker")


def _member(kind: type[E], value: str, text: str) -> E:
    try:
        return kind(value)
    except ValueError as exc:
        raise _wrong(text, f"{value!r} is not one of {', '.join(kind)}") from exc


def _number(parts: dict[str, str], name: str, text: str, *, below: int | None = None) -> int | None:
    value = parts.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise _wrong(text, f"{name} {value!r} is no whole number")
    if below is not None and int(value) >= below:
        raise _wrong(text, f"{name} {value} is over the last, {below - 1}")
    return int(value)


def _seconds(parts: dict[str, str], name: str, text: str) -> float | None:
    if name not in parts:
        return None
    try:
        value = float(parts[name])
    except ValueError as exc:
        raise _wrong(text, f"{name} {parts[name]!r} is no number of seconds") from exc
    if not 0 <= value < 1e7:
        raise _wrong(text, f"{name} {parts[name]!r} is no number of seconds")
    return value
