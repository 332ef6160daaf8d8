"""Everything that the doctor found, and what to change (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sidecar.doctor_checks import Check, Finding, Status, count, printable
from sidecar.doctor_evidence import Evidence, GateEvidence, PeerEvidence
from sidecar.doctor_server import judge_server
from sidecar.slo import Slo

MAX_MESSAGE = 500
SKEW_S = 3.0
"""The Date header counts whole seconds, and travels. Samples from 5 s ahead are refused by the controller."""
MONOTONIC_AHEAD_S = 0.5
"""A heartbeat of this host's clock cannot be from the future; this allows for a clock read just before the file."""
INSTALL = (
    "pip install ./sidecar/vllm_plugin into vLLM's environment, and start vLLM with WADILOCO_GATE_DIR={directory} "
    "and --middleware wadiloco_vllm_plugin.InFlightMiddleware"
)

OTHER_FOLDER = "; or give --gate, if the server has another WADILOCO_GATE_DIR"
"""Where the folder was guessed."""


def findings(evidence: Evidence, slo: Slo) -> list[Finding]:
    """Everything that there is to say, in the order in which one would look."""
    found = [
        *judge_server(evidence.server, slo, has_plugin=evidence.gate is not None and evidence.gate.plugin_engines > 0),
        *_host_and_gate(evidence),
        *_clock(evidence),
        *(_peer(peer) for peer in evidence.peers),
    ]
    return [replace(finding, message=printable(finding.message, MAX_MESSAGE)) for finding in found]


def _host_and_gate(evidence: Evidence) -> Iterator[Finding]:
    server, gate = evidence.server, evidence.gate
    if server.is_local is None:
        return
    if not server.is_local:
        yield Finding(
            Check.HOST,
            Status.WARN,
            f"{printable(server.host)} is another host: the gate works on the server's own host alone",
            "run the sidecar, the island and this command there; without a gate training does not yield to requests",
        )
        return
    where = f"{printable(server.host)} is this host" if server.host else "a Unix socket is on this host"
    yield Finding(Check.HOST, Status.OK, where)
    if gate is not None:
        yield _folder(gate)
        yield from _writers(gate)


def _folder(gate: GateEvidence) -> Finding:
    directory = printable(str(gate.directory))
    bad = Status.FAIL if gate.is_required else Status.WARN
    if gate.error:
        return Finding(Check.FOLDER, bad, f"{directory}: {printable(gate.error)}", INSTALL.format(directory=directory))
    if not gate.exists:
        remedy = INSTALL.format(directory=directory) + ("" if gate.is_required else OTHER_FOLDER)
        return Finding(Check.FOLDER, bad, f"{directory} does not exist", remedy)
    if not gate.is_readable or not gate.is_writable:
        lacking = "write" if gate.is_readable else "read"
        return Finding(
            Check.FOLDER, bad,
            f"this user (uid {gate.user}) cannot {lacking} {directory}, which belongs to uid {gate.owner}",
            f"run sidecar and island as uid {gate.owner}, or give all of them a folder of a common group",
        )  # fmt: skip
    return Finding(Check.FOLDER, Status.OK, f"{directory} can be read and written")


def _writers(gate: GateEvidence) -> Iterator[Finding]:
    if not gate.exists or not gate.is_readable:
        return
    directory = printable(str(gate.directory))
    if gate.num_ingress:
        yield Finding(
            Check.MIDDLEWARE, Status.OK, f"alive in {count(gate.num_ingress, 'API-server process', 'es')}; "
            f"{gate.in_flight} requests in flight",
        )  # fmt: skip
    else:
        yield Finding(
            Check.MIDDLEWARE, Status.WARN, "absent: the gate closes at the engine's step or the scrape, not at arrival",
            f"start vLLM with --middleware wadiloco_vllm_plugin.InFlightMiddleware and WADILOCO_GATE_DIR={directory}",
        )  # fmt: skip
    if gate.plugin_engines:
        seqs = f", at most {gate.max_num_seqs} requests at once each" if gate.max_num_seqs else ""
        yield Finding(Check.PLUGIN, Status.OK, f"writes steps of {count(gate.plugin_engines, 'engine')}{seqs}")
    else:
        yield Finding(
            Check.PLUGIN, Status.WARN, "absent: load and latencies are known at the cadence of scrapes alone",
            INSTALL.format(directory=directory),
        )  # fmt: skip
    yield Finding(
        Check.TRAINERS, Status.OK, f"{count(gate.num_trainers, 'trainer')} beside the server tell what they do"
    )


def _clock(evidence: Evidence) -> Iterator[Finding]:
    ahead_s = evidence.gate.ahead_s if evidence.gate is not None else 0.0
    if ahead_s > MONOTONIC_AHEAD_S:
        yield Finding(
            Check.CLOCK, Status.FAIL,
            f"a writer of the gate is {ahead_s:.1f} s ahead of this process's monotonic clock",
            "run both in the same time namespace; after a reboot remove the folder",
        )  # fmt: skip
        return
    skew_s = evidence.server.skew_s
    if skew_s is None:
        return
    if abs(skew_s) > SKEW_S:
        direction = "ahead of" if skew_s > 0 else "behind"
        yield Finding(
            Check.CLOCK, Status.WARN, f"the server's clock is {abs(skew_s):.0f} s {direction} this one",
            "run NTP on both: samples from 5 s ahead are refused, and times of both cannot be compared",
            {"skew_s": skew_s},
        )  # fmt: skip
    else:
        yield Finding(Check.CLOCK, Status.OK, "agrees with the server's to a few seconds", details={"skew_s": skew_s})


def _peer(peer: PeerEvidence) -> Finding:
    check = Check(peer.name)
    if peer.problem is None:
        return Finding(check, Status.OK, f"{peer.url} is well")
    return Finding(check, Status.FAIL, f"{peer.url}: {printable(peer.problem)}", peer.remedy)
