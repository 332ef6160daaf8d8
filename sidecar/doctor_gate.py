"""Looks at the folder of a gate: who writes into it, and whether this user may."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sidecar.doctor_evidence import GateEvidence
from sidecar.slo import parse_slo
from sidecar.source.ring import RingSource
from sidecar.trainers import TrainerWatch
from sidecar.vllm_plugin.files import open_regular
from sidecar.vllm_plugin.gate_reader import ALIVE_NS
from sidecar.vllm_plugin.identity import default_directory
from sidecar.vllm_plugin.records import (
    GATE_BYTES,
    GATE_FILE,
    SLOT_BYTES,
    Slot,
    SlotFlag,
    decode_slot,
    gate_header,
)

ANY_SLO = parse_slo("e2e:1s")
"""Nothing is judged here; a ring's reader wants one."""
FOREIGN = "the file gate in it is no gate of this version"


def find_gate(port: int) -> Path:
    """Where a server on this port keeps its gate: this user's folder, or that of another user if only it exists."""
    own = default_directory(port)
    with contextlib.suppress(OSError):
        others = sorted(own.parents[1].glob(f"wadiloco-*/{port}"))
        if others and own not in others:
            return others[0]
    return own


def look_at_gate(directory: Path, *, is_required: bool, now_ns: int, t_s: float) -> GateEvidence:
    """Everything that the folder tells at ``now_ns`` (monotonic); never raises for what is in it."""
    user = os.geteuid()
    try:
        found = directory.stat()
    except FileNotFoundError:
        return GateEvidence(directory=directory, is_required=is_required, user=user)
    except OSError as exc:
        return GateEvidence(directory=directory, is_required=is_required, user=user, error=str(exc.strerror or exc))
    if not directory.is_dir():
        return GateEvidence(directory=directory, is_required=is_required, user=user, error="is not a folder")
    slots, error = _read_slots(directory / GATE_FILE)
    living = [slot for slot in slots if abs(now_ns - slot.heartbeat_ns) <= ALIVE_NS]
    ingress = [slot for slot in living if slot.flags & SlotFlag.INGRESS]
    num_engines, max_num_seqs = _plugin(directory, now_ns=now_ns, t_s=t_s)
    return GateEvidence(
        directory=directory,
        is_required=is_required,
        user=user,
        exists=True,
        owner=found.st_uid,
        is_readable=os.access(directory, os.R_OK | os.X_OK),
        is_writable=os.access(directory, os.W_OK | os.X_OK),
        error=error,
        num_ingress=len(ingress),
        in_flight=sum(slot.in_flight for slot in ingress),
        plugin_engines=num_engines,
        max_num_seqs=max_num_seqs,
        num_trainers=_trainers(directory, now_ns=now_ns),
        ahead_s=max([0.0, *((slot.heartbeat_ns - now_ns) / 1e9 for slot in slots)]),
    )


def _read_slots(path: Path) -> tuple[list[Slot], str]:
    """The written slots, and what is wrong with the file."""
    try:
        fd = open_regular(path, os.O_RDONLY)
        try:
            raw = os.pread(fd, GATE_BYTES, 0)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return [], ""
    except OSError as exc:
        return [], f"gate: {exc.strerror or exc}"
    if len(raw) != GATE_BYTES or raw[:SLOT_BYTES] != gate_header():
        return [], FOREIGN
    pieces = (raw[start : start + SLOT_BYTES] for start in range(SLOT_BYTES, GATE_BYTES, SLOT_BYTES))
    return [slot for slot in map(decode_slot, pieces) if slot is not None], ""


def _plugin(directory: Path, *, now_ns: int, t_s: float) -> tuple[int, int | None]:
    """Engines whose steps a living plugin writes, and how many requests each runs at once."""
    source = RingSource(directory, ANY_SLO)
    try:
        exact = source.read(t_s=t_s, monotonic_s=now_ns / 1e9)
        return (exact.num_engines if exact is not None else 0), source.max_num_seqs
    finally:
        source.close()


def _trainers(directory: Path, *, now_ns: int) -> int:
    watch = TrainerWatch(directory, now_ns=now_ns)
    watch.poll(now_ns)
    return watch.status().num_trainers
