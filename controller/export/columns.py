"""The dictionary of columns: what every exported table has, in this order. Also the source of docs/exports.md.

A column that exists keeps its name, type, unit and meaning; new ones are put before ``id``, which stays the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Table(StrEnum):
    DECISIONS = "decisions"
    SAMPLES = "samples"
    ROUNDS = "rounds"
    RECOVERIES = "recoveries"


class Kind(StrEnum):
    """Type of a column; any value may be unknown (empty in CSV, null in Parquet)."""

    INTEGER = "integer"
    """64 bits, signed."""
    NUMBER = "number"
    """64-bit float."""
    TEXT = "text"
    BOOLEAN = "boolean"
    """``true`` or ``false``."""
    TIME = "time"
    """UTC, ISO 8601 with milliseconds: ``2026-01-31T12:00:00.000Z``; in Parquet a timestamp."""
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind
    unit: str
    """Empty where there is none."""
    text: str
    """One sentence."""


def _time(text: str) -> tuple[Column, Column]:
    return (
        Column("t", Kind.TIME, "UTC", f"{text}, as a date."),
        Column("t_s", Kind.NUMBER, "s", f"{text}, in Unix seconds."),
    )


def _id(text: str) -> Column:
    return Column("id", Kind.INTEGER, "", f"{text} Rises; pass the highest one as `since` to get what came later.")


SUMMARIES = {
    Table.DECISIONS: "One row per decision of the policy in force, or of one that runs beside it.",
    Table.SAMPLES: "One row per load sample of a server that the journal keeps.",
    Table.ROUNDS: (
        "One row per outer round, once it is closed. The rows end before the oldest round that is still open, so that"
        " none is left out by a reader that goes by `since`; reports that come after the close are not in rows read"
        " before."
    ),
    Table.RECOVERIES: (
        "One row for each thing that became known about a loss: `kind = trains_again` rows end a recovery and have all"
        " of its times."
    ),
}

DECISION_TERMS = (
    Column("h", Kind.NUMBER, "steps", "Least of the islands' inner steps since their last sync."),
    Column("h_max", Kind.NUMBER, "steps", "Greatest of the islands' inner steps since their last sync."),
    Column(
        "pressure", Kind.NUMBER, "fraction", "Highest load of the servers beside islands; an unknown one counts as 1."
    ),
    Column("unknown_servers", Kind.NUMBER, "servers", "Servers beside islands whose load was unknown."),
    Column("loss_drop", Kind.NUMBER, "nats", "Mean drop of the training loss since the last sync."),
    Column("tokens", Kind.NUMBER, "tokens", "Tokens that the islands trained on since their last sync."),
    Column("staleness_s", Kind.NUMBER, "s", "Time since the last outer sync, or since the run began."),
    Column("budget_remaining", Kind.NUMBER, "syncs", "Outer syncs left in the budget; unknown without a budget."),
    Column("budget_due_in_s", Kind.NUMBER, "s", "Time until the rest of the budget would no longer fit."),
    Column("score", Kind.NUMBER, "", "Value of syncing minus its cost, for policies with a score."),
    Column("threshold", Kind.NUMBER, "", "Score from which the policy syncs."),
    Column("sync_cost", Kind.NUMBER, "violations", "Expected violations of a sync that starts now, where known."),
    Column("price", Kind.NUMBER, "violations", "Cost up to which the policy syncs now, for policies with a price."),
)
"""Terms that have a column of their own; all of them are in ``terms``, too."""

RECOVERY_PHASES = (
    ("detect", "lost_s", "detected_s"),
    ("fence", "detected_s", "taken_s"),
    ("fetch", "taken_s", "fetched_s"),
    ("load", "fetched_s", "loaded_s"),
    ("first_step", "loaded_s", "first_step_s"),
)
"""Phases of a recovery, and the times between which each is."""

COLUMNS: dict[Table, tuple[Column, ...]] = {
    Table.DECISIONS: (
        *_time("When it was taken"),
        Column("policy", Kind.TEXT, "", "Name of the policy."),
        Column("action", Kind.TEXT, "", "`sync` or `defer`."),
        Column("reason", Kind.TEXT, "", "Why, as in the metric `wadiloco_controller_decisions_total`."),
        Column("round", Kind.INTEGER, "", "Version of the global parameters: outer steps taken before."),
        Column("slot", Kind.INTEGER, "", "Island that it is about; empty when it is about all of them together."),
        Column(
            "shadow", Kind.BOOLEAN, "", "Whether it was only noted down, of a policy that runs beside the one in force."
        ),
        Column("num_slots", Kind.INTEGER, "slots", "Islands that were ready."),
        Column("slots", Kind.JSON, "", "Slots of these islands, as a list."),
        *DECISION_TERMS,
        Column("terms", Kind.JSON, "", "Every term of the decision by name, as an object."),
        _id("Number of the decision."),
    ),
    Table.SAMPLES: (
        *_time("End of the interval"),
        Column("server_id", Kind.TEXT, "", "Name of the server."),
        Column("node", Kind.TEXT, "", "Host of the server."),
        Column("state", Kind.TEXT, "", "State of the engine: `ready`, `stale`, `down` and so on."),
        Column(
            "interval_s", Kind.NUMBER, "s", "Length of the interval; unknown on the first scrape and after a restart."
        ),
        Column("running", Kind.NUMBER, "requests", "Requests in the engine."),
        Column("waiting", Kind.NUMBER, "requests", "Requests that wait."),
        Column("waiting_capacity", Kind.NUMBER, "requests", "Of these, the ones that wait for room in the engine."),
        Column("kv_usage_frac", Kind.NUMBER, "fraction", "KV cache in use."),
        Column("arrivals", Kind.NUMBER, "requests", "Requests that arrived in the interval (estimate)."),
        Column("finished", Kind.NUMBER, "requests", "Requests that finished in the interval."),
        Column("prompt_tokens", Kind.NUMBER, "tokens", "Prompt tokens processed in the interval."),
        Column("generation_tokens", Kind.NUMBER, "tokens", "Tokens generated in the interval."),
        Column("preemptions", Kind.NUMBER, "requests", "Requests that the engine preempted in the interval."),
        Column("rejections", Kind.NUMBER, "requests", "Requests that the server refused in the interval."),
        Column("ttft_mean_s", Kind.NUMBER, "s", "Mean time to the first token in the interval."),
        Column("itl_mean_s", Kind.NUMBER, "s", "Mean inter-token latency in the interval."),
        Column("e2e_mean_s", Kind.NUMBER, "s", "Mean end-to-end latency of requests that finished in the interval."),
        Column("slo_requests", Kind.NUMBER, "requests", "Requests that were judged against the SLO in the interval."),
        Column("slo_attained", Kind.NUMBER, "requests", "Of these, the ones that did not certainly miss it."),
        Column("slo_violations", Kind.NUMBER, "requests", "Of these, the ones that certainly missed it."),
        Column("slo_violations_upper", Kind.NUMBER, "requests", "Of these, the ones that may have missed it."),
        Column(
            "pressure_frac", Kind.NUMBER, "fraction", "How loaded the server is: 0 idle, 1 full; unknown counts as 1."
        ),
        Column("trainer_phase", Kind.TEXT, "", "What trainers beside it did: `sync`, `inner` or `none`."),
        Column("sync_cost_per_s", Kind.NUMBER, "violations/s", "Violations per second that a sync would have added."),
        Column("sync_cost_now", Kind.NUMBER, "violations", "Expected violations of a one-second sync that starts now."),
        _id("Number of the sample in the journal."),
    ),
    Table.ROUNDS: (
        *_time("When it was directed, or when islands began it by themselves"),
        Column(
            "round", Kind.INTEGER, "", "Version of the global parameters before it; tried again under the same number."
        ),
        Column("outcome", Kind.TEXT, "", "`applied`, `partial` (some contributions) or `failed`."),
        Column("policy", Kind.TEXT, "", "Policy in force."),
        Column("reason", Kind.TEXT, "", "Why it was directed, or `autonomous`, or `unreported`."),
        Column(
            "decision_id", Kind.INTEGER, "", "`id` in `decisions`; empty for a round that islands began by themselves."
        ),
        Column("counted", Kind.BOOLEAN, "", "Whether it was an outer step, and thus a sync of the budget."),
        Column("directed_s", Kind.NUMBER, "s", "When it was directed, in Unix seconds."),
        Column("started_s", Kind.NUMBER, "s", "When the first island left its inner steps, in Unix seconds."),
        Column("finished_s", Kind.NUMBER, "s", "When the last island went on with inner steps, in Unix seconds."),
        Column("closed_s", Kind.NUMBER, "s", "When the controller closed it, in Unix seconds."),
        Column("duration_s", Kind.NUMBER, "s", "From the first island's start to the last one's end."),
        Column("open_s", Kind.NUMBER, "s", "From directive or first report to close."),
        Column("push_max_s", Kind.NUMBER, "s", "Longest upload of a contribution."),
        Column("bytes_pushed", Kind.INTEGER, "bytes", "Sent to the synchronizer by all islands."),
        Column("bytes_pulled", Kind.INTEGER, "bytes", "Fetched from the synchronizer by all islands."),
        Column("tokens", Kind.INTEGER, "tokens", "Tokens that the contributions stand for."),
        Column("inner_steps_max", Kind.INTEGER, "steps", "Most inner steps that one contribution stands for."),
        Column(
            "num_expected",
            Kind.INTEGER,
            "slots",
            "Islands that it was directed to, or that lived when it was found out.",
        ),
        Column("num_applied", Kind.INTEGER, "slots", "Islands whose contribution was in the outer step."),
        Column("num_late", Kind.INTEGER, "slots", "Islands whose contribution came too late for it."),
        Column(
            "num_failed", Kind.INTEGER, "slots", "Islands whose sync failed, and directed ones that never reported."
        ),
        Column("slots_expected", Kind.JSON, "", "Slots of these islands, as a list."),
        Column("slots_applied", Kind.JSON, "", "Slots of the applied contributions, as a list."),
        Column("slots_late", Kind.JSON, "", "Slots of the late contributions, as a list."),
        Column("slots_stale", Kind.JSON, "", "Of these, slots whose contribution a later round took with less weight."),
        Column("staleness_max", Kind.INTEGER, "versions", "Most versions that one of these was behind."),
        Column("slots_failed", Kind.JSON, "", "Slots of the failed ones, as a list."),
        _id("Number of the round in the journal."),
    ),
    Table.RECOVERIES: (
        *_time("When it became known"),
        Column("kind", Kind.TEXT, "", "What became known, as in the metric `wadiloco_controller_recoveries_total`."),
        Column("slot", Kind.INTEGER, "", "Slot that was lost or taken; empty when it is about the whole run."),
        Column("agent_id", Kind.TEXT, "", "Agent that was lost, or that has the slot now."),
        Column("from_agent", Kind.TEXT, "", "Agent that had the slot before."),
        Column("epoch", Kind.INTEGER, "", "Epoch of the fleet then."),
        Column("recovery", Kind.INTEGER, "", "Number of the recovery: the same in all of its rows."),
        Column(
            "lost_s",
            Kind.NUMBER,
            "s",
            "Last sign of life before, in Unix seconds; of an order, when it was carried out.",
        ),
        Column("taken_s", Kind.NUMBER, "s", "When the slot had a living holder again, in Unix seconds."),
        Column("first_step_s", Kind.NUMBER, "s", "When that one's first inner step was reported, in Unix seconds."),
        Column("handover_s", Kind.NUMBER, "s", "From `lost_s` to `taken_s`."),
        Column("down_s", Kind.NUMBER, "s", "From `lost_s` to `first_step_s`: how long the slot did not train."),
        Column("detected_s", Kind.NUMBER, "s", "When the loss was seen, in Unix seconds."),
        Column("fetched_s", Kind.NUMBER, "s", "When the slot's state was on the new holder's host, in Unix seconds."),
        Column("loaded_s", Kind.NUMBER, "s", "When the worker had the state, in Unix seconds."),
        *(
            Column(f"{name}_s", Kind.NUMBER, "s", f"From `{begin}` to `{end}`; in `trains_again` rows.")
            for name, begin, end in RECOVERY_PHASES
            if name != "first_step"
        ),
        Column("rung", Kind.TEXT, "", "Where the state came from: `vault`, `replica`, `global`, `disk` or `fresh`."),
        Column("generation", Kind.INTEGER, "", "Number of the snapshot that was restored."),
        Column("step", Kind.INTEGER, "steps", "Inner step at which training went on."),
        Column("steps_lost", Kind.INTEGER, "steps", "Inner steps that were taken again, as far as anybody knows."),
        Column("detail", Kind.TEXT, "", "What could not be used, and why."),
        _id("Number of the row."),
    ),
}


def names_of(table: Table) -> tuple[str, ...]:
    return tuple(column.name for column in COLUMNS[table])


def describe_columns(table: Table) -> Iterator[str]:
    """The table's section of the documentation, in Markdown."""
    yield f"### `{table}`"
    yield ""
    yield SUMMARIES[table]
    yield ""
    yield "| column | type | unit | meaning |"
    yield "|---|---|---|---|"
    for column in COLUMNS[table]:
        yield f"| `{column.name}` | {column.kind} | {column.unit} | {column.text} |"
