"""From samples in a journal to observations: which intervals count, and as what phase."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.records import AgentRecord, Membership, RoundEntry, SlotReport
from diloco.schema import SyncOutcome, SyncReport
from replay.loadgen import RequestResult, Status
from replay.recorded import Observation, Training, observations, request_observations
from replay.requests_file import REQUESTS, read_requests, write_requests
from service.errors import InputError, UnavailableError
from sidecar.calibrator import Phase
from sidecar.schema import EngineState, LoadSample
from sidecar.slo import parse_slo

NONE, INNER, SYNC = Phase


def sample(t_s: float, *, server_id: str = "server-0", node: str = "host-0", **fields: Any) -> LoadSample:
    known: dict[str, Any] = {
        "interval_s": 1.0, "running": 2, "waiting": 0, "slo_requests": 4, "slo_violations": 1, **fields
    }  # fmt: skip
    return LoadSample(server_id=server_id, node=node, t_s=t_s, state=EngineState.READY, **known)


def agent(slot: int = 0, *, server_id: str | None = "server-0", node: str = "host-0") -> AgentRecord:
    return AgentRecord(
        agent_id=f"island-{slot}",
        instance="first",
        node=node,
        server_id=server_id,
        url=None,
        num_parameters=None,
        membership=Membership.ACTIVE,
        slot=slot,
        last_slot=slot,
        granted_epoch=1,
        registered_s=10.0,
        last_beat_s=100.0,
    )


def round_of(*spans: tuple[int, float, float]) -> RoundEntry:
    """A round with a report per (slot, start, end)."""
    reports = tuple(
        SlotReport(
            slot=slot,
            report=SyncReport(
                round=0,
                outcome=SyncOutcome.APPLIED,
                started_s=start_s,
                pushed_s=start_s,
                finished_s=end_s,
                bytes_pushed=1,
                bytes_pulled=1,
                inner_steps=1,
                tokens=1,
                update_norm=1.0,
                autonomous=False,
                detail="",
            ),
        )
        for slot, start_s, end_s in spans
    )
    return RoundEntry(
        id=1, round=0, decision_id=None, policy="p", reason="r", directed_s=None, opened_s=1.0, deadline_s=2.0,
        expected=(0,), reports=reports,
    )  # fmt: skip


def test_an_interval_has_the_mean_load_of_its_ends() -> None:
    samples = [sample(50.0, running=1, waiting=0), sample(51.0, running=3, waiting=2, slo_requests=7)]
    assert list(observations(samples, Training([], [])))[-1] == Observation("server-0", 3.0, NONE, 7, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"interval_s": None},
        {"slo_requests": 0, "slo_violations": 0},
        {"slo_requests": None},
        {"slo_violations": None},
        {"running": None},
        {"waiting": None},
    ],
)
def test_what_is_unknown_is_left_out(fields: dict[str, Any]) -> None:
    assert list(observations([sample(50.0), sample(51.0, **fields)], Training([], []))) == []


def test_servers_do_not_mix() -> None:
    samples = [sample(50.0, running=8), sample(50.5, server_id="server-1"), sample(51.0), sample(51.5, running=None)]
    assert [(seen.server_id, seen.load) for seen in observations(samples, Training([], []))] == [("server-0", 5.0)]


@pytest.mark.parametrize("phase", list(Phase))
def test_what_the_trainers_told_counts_before_what_the_rounds_say(phase: Phase) -> None:
    training = Training([agent()], [round_of((0, 50.0, 51.0))])
    samples = [sample(50.0), sample(51.0, trainer_phase=phase.value)]
    assert [seen.phase for seen in observations(samples, training)] == [phase]


@pytest.mark.parametrize(
    ("t_s", "span", "phase"),
    [
        (51.0, (50.2, 50.6), SYNC),
        (51.0, (50.95, 51.5), INNER),
        (51.0, (51.0, 52.0), INNER),
        (51.0, (0.0, 99.0), SYNC),
        (5.0, (50.0, 51.0), NONE),
        (200.0, (50.0, 51.0), NONE),
    ],
)
def test_without_word_of_the_trainers_rounds_and_agents_tell(
    t_s: float, span: tuple[float, float], phase: Phase
) -> None:
    assert Training([agent()], [round_of((0, *span))]).phase(sample(t_s)) is phase


@pytest.mark.parametrize(
    ("island", "phase"),
    [
        (agent(), SYNC),
        (agent(1), INNER),
        (agent(server_id="server-1"), NONE),
        (agent(server_id=None), SYNC),
        (agent(server_id=None, node="host-1"), NONE),
    ],
)
def test_only_islands_beside_the_server_disturb_it(island: AgentRecord, phase: Phase) -> None:
    assert Training([island], [round_of((0, 50.0, 51.0))]).phase(sample(51.0)) is phase


def request(sent_s: float, ended_s: float, *, server: int = 0, status: Status = Status.OK) -> RequestResult:
    e2e_s = ended_s - sent_s if status is Status.OK else None
    return RequestResult(
        index=0,
        server_index=server,
        arrival_s=sent_s,
        sent_s=sent_s,
        ended_s=ended_s,
        sent_unix_s=sent_s,
        ended_unix_s=ended_s,
        status=status,
        e2e_s=e2e_s,
    )


SLO = parse_slo("e2e:300ms")


def test_requests_stand_for_the_intervals_of_a_sidecar() -> None:
    results = [
        request(100.0, 100.2),
        request(100.5, 101.5),
        request(100.9, 102.0),
        request(101.0, 101.2, status=Status.TIMEOUT),
        request(101.0, 101.1, status=Status.CANCELLED),
        request(100.0, 100.1, server=1),
    ]
    assert list(request_observations(results, SLO)) == [
        # In flight at 100, 101 and 102 s: 1, 3 and 0.
        Observation("server-0", 2.0, NONE, 1, 0),
        Observation("server-0", 1.5, NONE, 3, 3),
        Observation("server-1", 0.5, NONE, 1, 0),
    ]
    assert list(request_observations([], SLO)) == []


SPANS = st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 20)), min_size=1, max_size=40)


@given(SPANS, st.floats(0.1, 5))
def test_every_request_counts_once(spans: list[tuple[float, float]], interval_s: float) -> None:
    results = [request(1e9 + sent_s, 1e9 + sent_s + length_s) for sent_s, length_s in spans]
    seen = list(request_observations(results, SLO, interval_s=interval_s))
    assert sum(one.requests for one in seen) == len(results)
    assert sum(one.violations for one in seen) == sum((one.e2e_s or 0.0) > 0.3 for one in results)
    assert all(0 <= one.load <= len(results) for one in seen)


def test_requests_survive_the_file(tmp_path: Path) -> None:
    results = [request(1.0, 2.0), replace(request(1.0, 1.5, status=Status.REFUSED), itl_s=(0.1, 0.2), detail="gone")]
    write_requests(tmp_path / "run", results)
    assert read_requests(tmp_path / "run" / REQUESTS) == results
    with pytest.raises(InputError, match="cannot be read"):
        read_requests(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="out: cannot write"):
        write_requests(tmp_path / "file", results)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ended_unix_s", "1e12"),
        ("ended_unix_s", "1e10"),
        ("sent_unix_s", "Infinity"),
        ("sent_unix_s", "NaN"),
        ("ended_unix_s", "1e308"),
        ("sent_unix_s", "-1"),
        ("e2e_s", "1e308"),
        ("ttft_s", "NaN"),
        ("itl_s", "[0.1, Infinity]"),
        ("server_index", "1e400"),
    ],
)
def test_an_absurd_time_is_refused_by_line_and_field(tmp_path: Path, field: str, value: str) -> None:
    write_requests(tmp_path, [request(1.0, 2.0)] * 2)
    path = tmp_path / REQUESTS
    good, changed = path.read_text().splitlines()
    changed = re.sub(rf'"{field}":(\[[^]]*\]|[^,}}]*)', f'"{field}":{value}', changed)
    path.write_text(f"{good}\n{changed}\n")
    with pytest.raises(InputError, match=f"{REQUESTS} has a line that is no request: line 2: {field}"):
        read_requests(path)


def test_silence_between_two_requests_costs_nothing() -> None:
    late_s = 1e15
    seen = list(request_observations([request(0.0, 0.1), request(late_s, late_s + 1)], SLO))
    assert [(one.requests, one.violations) for one in seen] == [(1, 0), (1, 1)]
