import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from replay.caveats import caveats, unspent
from replay.loadgen import RequestResult, Status
from replay.report import reading, render_markdown, render_table
from replay.slo import violates
from replay.stats import gap_closed
from replay.summarize import TrainingOutcome, compare_all, summarize_run, this_machine
from replay.summary import Budget, Comparison, Run, Scaling, SloSpec, Summary, TraceSlice, read_json, write_json
from replay.timeline import SyncWindow
from service.errors import InputError, UnavailableError
from sidecar.slo import SloMetric, parse_slo

SLO = parse_slo("e2e:200ms")
DESIGN_RUN_KEYS = {
    *("policy", "seed", "draw", "mode", "requests", "violations", "violation_rate", "sync_excess_rate", "ttft_ms"),
    *("itl_ms", "e2e_ms", "outer_syncs", "sync_busy_s", "tokens_trained", "final_loss", "loadgen_late_p99_ms"),
}


def result(
    index: int, *, e2e_s: float | None = 0.1, itl_s: Sequence[float] = (0.01, 0.02), status: Status = Status.OK
) -> RequestResult:
    return RequestResult(
        index=index,
        server_index=0,
        arrival_s=float(index),
        sent_s=index + 0.002,
        ended_s=index + 0.002 + (e2e_s or 1.0),
        sent_unix_s=0.0,
        ended_unix_s=0.0,
        status=status,
        ttft_s=None if e2e_s is None else e2e_s / 2,
        itl_s=tuple(itl_s),
        e2e_s=e2e_s,
        detail="" if status is Status.OK else "HTTP 503: full",
    )


def failed(index: int, status: Status = Status.HTTP_ERROR) -> RequestResult:
    return result(index, e2e_s=None, itl_s=(), status=status)


def run_of(policy: str, results: Sequence[RequestResult], *, seed: int = 0, draw: int = 0, syncs: int = 4) -> Run:
    training = TrainingOutcome(
        outer_syncs=syncs,
        inner_steps=1234,
        tokens_trained=5_000_000,
        first_loss=5.5,
        final_loss=3.25,
        sync_windows=tuple(SyncWindow(10.0 * number, 10.0 * number + 2, slot=0) for number in range(syncs)),
    )
    return summarize_run(results, policy=policy, seed=seed, draw=draw, slo=SLO, training=training)


def summary_of(*runs: Run) -> Summary:
    return Summary(
        trace="bursty.jsonl",
        slo=SloSpec(metric="e2e", threshold_ms=200),
        budget=Budget(outer_syncs=4, min_gap_s=10),
        runs=list(runs),
        comparisons=compare_all(runs),
        gap_closed=gap_closed(runs),
        slice=TraceSlice(
            format="plain",
            rate_scale=2,
            start_s=5,
            duration_s=60,
            num_requests=200,
            mean_rate_per_s=3.33,
            peak_rate_per_s=19,
            variance_to_mean=6.3,
            empty_frac=0.42,
        ),
        scaling=Scaling(
            max_prompt_tokens=128,
            max_output_tokens=32,
            prompt_factor=0.25,
            output_factor=1,
            prompt_clipped_frac=0.05,
            output_clipped_frac=0,
            prompt_tokens_mean=60,
            output_tokens_mean=15,
        ),
        machine=this_machine(),
        timeline="timeline.png",
    )


GOOD = [result(index) for index in range(40)]
BAD = [result(index, e2e_s=0.3 if index % 4 == 0 else 0.1) for index in range(40)]


@pytest.mark.parametrize(
    ("slo", "violated"),
    [
        ("e2e:100ms", False),
        ("e2e:99ms", True),
        ("ttft:50ms", False),
        ("ttft:49ms", True),
        ("itl:20ms", False),
        ("itl:19ms", True),
        ("tpot:25ms", False),
        ("tpot:24ms", True),
        ("ttft:50ms,itl:20ms,tpot:25ms,e2e:100ms", False),
        ("ttft:50ms,itl:20ms,e2e:99ms", True),
        ("ttft:49ms,e2e:100ms@50%", True),
    ],
)
def test_a_request_violates_above_the_threshold_only(slo: str, violated: bool) -> None:
    assert violates(result(0), parse_slo(slo)) is violated


def test_a_failed_request_violates_every_objective_and_one_token_no_bound_on_gaps() -> None:
    assert all(violates(failed(0), parse_slo(f"{metric}:1000s")) for metric in SloMetric)
    assert not violates(result(0, itl_s=()), parse_slo("itl:1ms"))


def test_a_run_counts_failures_as_violations_and_leaves_cancelled_requests_out() -> None:
    run = run_of("p", [*BAD, failed(40), failed(41, Status.TIMEOUT), failed(42), failed(43, Status.CANCELLED)])
    assert (run.requests, run.violations) == (43, 13)
    assert run.violation_rate == pytest.approx(13 / 43)
    assert run.failed_requests == {"http_error": 2, "timeout": 1}
    assert run.errors[0] == "2 x http_error: HTTP 503: full"
    assert run.e2e_ms is not None
    assert run.e2e_ms.p50 == pytest.approx(100)
    assert run.itl_ms is not None
    assert run.itl_ms.p50 == pytest.approx(15)
    assert run.loadgen_late_p99_ms == pytest.approx(2)
    assert run.sync_busy_s == pytest.approx(8)


def test_a_run_whose_requests_all_failed_has_no_latencies() -> None:
    run = run_of("p", [failed(0), failed(1)])
    assert (run.violation_rate, run.ttft_ms, run.itl_ms, run.e2e_ms) == (1, None, None, None)
    assert render_markdown(summary_of(run))


def test_a_run_without_requests_has_no_rate() -> None:
    with pytest.raises(ValueError, match="no request"):
        run_of("p", [failed(0, Status.CANCELLED)])


def test_every_policy_is_compared_with_no_sync_and_with_random() -> None:
    runs = [run_of(policy, GOOD) for policy in ("no_sync", "random_deferral", "ours")]
    pairs = [(found.a, found.b) for found in compare_all(runs)]
    assert pairs == [("random_deferral", "no_sync"), ("ours", "no_sync"), ("ours", "random_deferral")]


def test_the_summary_has_the_agreed_keys_and_survives_a_round_trip(tmp_path: Path) -> None:
    summary = summary_of(run_of("no_sync", GOOD, syncs=0), run_of("ours", BAD))
    path = tmp_path / "summary.json"
    write_json(summary, path)
    written = json.loads(path.read_text())
    assert {"trace", "slo", "budget", "runs", "comparisons", "gap_closed"} <= written.keys()
    assert written["slo"] == {"metric": "e2e", "threshold_ms": 200, "objectives_ms": {}, "target_frac": None}
    assert written["budget"] == {"outer_syncs": 4, "min_gap_s": 10}
    assert written["runs"][0].keys() >= DESIGN_RUN_KEYS
    assert set(written["runs"][0]["e2e_ms"]) == {"p50", "p95", "p99"}
    assert set(written["comparisons"][0]) == {"a", "b", "metric", "mean_diff", "ci95", "p_value", "n"}
    assert read_json(path) == summary
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    summary = summary_of(run_of("ours", GOOD))
    with pytest.raises(UnavailableError, match="cannot write") as caught:
        write_json(summary, tmp_path / "absent" / "summary.json")
    assert caught.value.field == "--out"
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(UnavailableError):
        write_json(summary, tmp_path / "summary.json")
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("content", [None, "", "{}", '{"trace": 1}'])
def test_a_file_that_is_no_summary_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "summary.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert caught.value.field == str(path)


def test_the_report_states_results_scaling_machine_and_picture() -> None:
    runs = [run_of("no_sync", GOOD, syncs=0), run_of("ours", BAD), run_of("ours", GOOD, draw=1)]
    text = render_markdown(summary_of(*runs))
    (row,) = (line for line in text.splitlines() if line.startswith("| ours | 2 |"))
    assert "12.5% (0.0% to 25.0%)" in row
    assert "5.50→3.25" in row
    for needle in ("e2e at most 200 ms", "4 outer syncs", "prompts times 0.25", "5.0% cut", "variance/mean", "6.3"):
        assert needle in text
    assert "![Load, training, syncs and violations over time](timeline.png)" in text
    assert re.search(r"Machine: \d+ CPU core", text)
    tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len(set(tables)) <= 2


def test_few_seeds_are_never_called_significant() -> None:
    runs = [run_of(policy, GOOD if policy == "ours" else BAD) for policy in ("no_sync", "random_deferral", "ours")]
    text = render_markdown(summary_of(*runs))
    assert "too few seeds to tell" in text
    assert "not claimed to be significant" in text
    assert "is lower" not in text


@pytest.mark.parametrize(
    ("n", "p_value", "mean_diff", "expected"),
    [
        (4, 0.001, -0.1, "too few seeds to tell"),
        (8, 0.2, -0.1, "no difference shown"),
        (8, 0.008, -0.1, "ours is lower"),
        (8, 0.008, 0.1, "ours is higher"),
    ],
)
def test_a_reading_is_no_stronger_than_its_data(n: int, p_value: float, mean_diff: float, expected: str) -> None:
    found = Comparison(a="ours", b="x", metric="violation_rate", mean_diff=mean_diff, ci95=(0, 0), p_value=p_value, n=n)
    assert reading(found) == expected


def test_intervals_from_few_seeds_are_called_too_narrow() -> None:
    runs = [run_of(policy, GOOD, seed=seed) for seed in range(5) for policy in ("random_deferral", "ours")]
    assert "too narrow with few seeds" in render_markdown(summary_of(*runs))


def test_caveats_name_unequal_budgets_few_draws_and_a_late_generator() -> None:
    late = run_of("random_deferral", [result(0)]).model_copy(update={"loadgen_late_p99_ms": 50.0})
    found = " ".join(caveats(summary_of(late, run_of("ours", GOOD, syncs=2))))
    assert "different numbers of outer syncs (2 to 4)" in found
    assert "1 draw per seed" in found
    assert "50 ms late" in found


def test_enough_seeds_and_draws_leave_only_the_standing_caveat() -> None:
    runs = [
        run_of(policy, GOOD, seed=seed, draw=draw)
        for seed in range(5)
        for policy, draws in (("random_deferral", 5), ("ours", 1))
        for draw in range(draws)
    ]
    assert len(caveats(summary_of(*runs).model_copy(update={"scaling": None}))) == 1


def test_requests_far_smaller_than_the_traces_are_said_to_be() -> None:
    assert any("Prompts were scaled to 0.25 of their length" in line for line in caveats(summary_of(run_of("x", GOOD))))


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_shows_every_policy(width: int) -> None:
    runs = [run_of("random_deferral", [*BAD, failed(40)]), run_of("wa_diloco", GOOD)]
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=False).print(render_table(summary_of(*runs)))
    text = output.getvalue()
    for needle in ("random_deferral", "wa_diloco", "26.8%", "1 request failed"):
        assert needle in text
    if width == 120:
        assert "5.50→3.25" in text


def test_a_table_cell_cannot_break_the_table() -> None:
    assert "a\\|b" in render_markdown(summary_of(run_of("a|b", GOOD)))


@pytest.mark.parametrize(
    ("slo", "title", "legend"),
    [
        (SloSpec(metric="e2e", threshold_ms=200), "SLO: e2e at most 200 ms.", "missed the objective, and"),
        (
            SloSpec(metric="e2e", threshold_ms=2000, objectives_ms={"ttft": 200, "e2e": 2000}, target_frac=0.99),
            "SLO: ttft at most 200 ms, e2e at most 2000 ms.",
            "missed any of the objectives, and",
        ),
    ],
)
def test_the_report_names_every_objective(slo: SloSpec, title: str, legend: str) -> None:
    text = render_markdown(summary_of(run_of("no_sync", GOOD)).model_copy(update={"slo": slo}))
    assert title in text
    assert legend in text


def test_a_budget_that_was_not_spent_is_said_with_who_and_what_to_do() -> None:
    runs = [run_of("no_sync", [result(0)], syncs=0), run_of("wa_diloco", [result(0)], syncs=1)]
    (said,) = unspent(summary_of(*runs))
    assert said.startswith("wa_diloco spent fewer syncs than the budget has (as few as 1 of 4)")
    assert "min_h" in said
    assert said in caveats(summary_of(*runs))
    assert unspent(summary_of(run_of("wa_diloco", [result(0)], syncs=4))) == []
