// What happened: decisions, rounds, budget, recoveries.

import { budgetChart, drawFigures, figure, roundsChart } from "./chart.js";
import { byId, h, setText } from "./dom.js";
import { bytes, capital, clock, count, duration, isKnown, list, moment, short, whole, words } from "./format.js";
import { sentence } from "./reasons.js";
import { Table } from "./table.js";

const OUTCOMES = { applied: "good", partial: "warn", failed: "bad", open: "run" };
const ROUNDS_SHOWN_S = 1800;

export function decisionsTable(run) {
  const because = (cell, row) => {
    let parts = cell.parts;
    if (!parts) {
      parts = cell.parts = { text: h("summary"), terms: h("dl", { class: "terms" }) };
      cell.append(h("details", {}, parts.text, parts.terms));
    }
    setText(parts.text, capital(sentence(row, run())));
    updateTerms(parts.terms, row.terms);
  };
  return new Table(byId("decisions"), {
    caption: "Decisions of the policy, newest first",
    key: (row) => row.first_id,
    limit: 100,
    empty: "No decision has been taken yet.",
    columns: [
      { title: "When", head: true, text: (row) => (row.count > 1 ? `${moment(row.first_s)} – ${clock(row.last_s)}` : moment(row.first_s)) },
      { title: "Action", text: (row) => (row.action === "sync" ? "sync" : "no sync"), kind: (row) => (row.action === "sync" ? "run" : "unknown") },
      { title: "Why", cell: "wrap", text: (row) => `${row.last_id}`, show: because },
      { title: "Reason", text: (row) => row.reason },
      { title: "Times", num: true, text: (row) => whole(row.count) },
      { title: "Round", num: true, text: (row) => whole(row.round) },
      { title: "About", text: (row) => (isKnown(row.slot) ? `slot ${row.slot}` : "all islands") },
      { title: "Policy", cell: "text", text: (row) => (row.shadow ? `${row.policy} (shadow)` : row.policy) },
    ],
  });
}

function updateTerms(place, terms) {
  const names = Object.keys(terms);
  if (place.names !== names.join()) {
    place.names = names.join();
    place.values = names.map(() => h("dd"));
    place.replaceChildren(...names.map((name, at) => h("div", {}, h("dt", {}, name), place.values[at])));
  }
  names.forEach((name, at) => setText(place.values[at], name.endsWith("_s") ? duration(terms[name]) : short(terms[name])));
}

export const newestDecisions = (store) => [...store.decisions.values()].sort((a, b) => b.last_id - a.last_id);

/** The decision that is in force for the whole run: not another policy's, and not about one island. */
export const presentDecision = (rows) => rows.find((row) => !row.shadow && !isKnown(row.slot)) ?? rows.find((row) => !row.shadow);

export function roundsTable() {
  return new Table(byId("rounds"), {
    caption: "Outer rounds, newest first",
    key: (row) => row.id,
    limit: 100,
    empty: "No round has begun yet.",
    columns: [
      { title: "Round", head: true, text: (row) => whole(row.round) },
      { title: "Outcome", text: (row) => row.outcome, kind: (row) => OUTCOMES[row.outcome] },
      { title: "Began", text: (row) => moment(row.began_s) },
      { title: "Duration", num: true, text: (row, now_s) => duration(row.outcome === "open" ? now_s - row.began_s : row.duration_s) },
      { title: "Bytes", num: true, text: (row) => bytes(row.bytes_total) },
      { title: "Slots applied", text: (row) => list(row.slots_applied) },
      { title: "Late", text: (row) => list(row.slots_late) },
      { title: "Failed", text: (row) => list(row.slots_failed), kind: (row) => (row.slots_failed.length ? "bad" : "") },
      { title: "Reason", text: (row) => row.reason },
      { title: "Budget", text: (row) => (row.spent ? "one sync" : "nothing") },
      { title: "Policy", cell: "text", text: (row) => row.policy },
    ],
  });
}

export function drawRounds(store, now_s) {
  const all = [...store.rounds.values()];
  const from_s = Math.max(now_s - ROUNDS_SHOWN_S, Math.min(now_s - 60, ...all.map((round) => round.began_s)));
  const rounds = all
    .map((round) => ({ ...round, end_s: round.outcome === "open" ? now_s : round.began_s + (round.duration_s ?? 0) }))
    .filter((round) => round.end_s >= from_s)
    .map((round) => ({ ...round, title: `round ${round.round}: ${round.outcome}, ${duration(round.end_s - round.began_s)}` }));
  byId("rounds-chart").hidden = all.length === 0;
  const label = `${count(rounds.length, "round")} within the last ${duration(now_s - from_s)}`;
  const legend = Object.keys(OUTCOMES).map((name) => [name, name]);
  const fromLabel = `−${duration(now_s - from_s)}`;
  drawFigures(byId("rounds-chart"), (width) => [
    figure(label, roundsChart({ label, width, from_s, until_s: now_s, rounds, fromLabel }), legend),
  ]);
}

/** Syncs that may still be spent, or at which rate. */
export function budgetLeft({ spec, remaining }) {
  if (isKnown(spec.outer_syncs)) return whole(remaining);
  return isKnown(spec.syncs_per_hour) ? `${short(spec.syncs_per_hour)} per hour` : "unlimited";
}

export function drawBudget(store, now_s) {
  const { status, spent_at_s } = store.budget;
  const { spec } = status;
  const ends_s = isKnown(spec.horizon_s) ? status.started_s + spec.horizon_s : null;
  const facts = [
    ["Spent", whole(status.spent)],
    ["Remaining", budgetLeft(status)],
    ["Longest wait", isKnown(spec.max_defer_s) ? duration(spec.max_defer_s) : "none"],
    ["Least gap", spec.min_gap_s > 0 ? duration(spec.min_gap_s) : "none"],
    ["Period", isKnown(ends_s) ? (now_s < ends_s ? `${duration(ends_s - now_s)} left of ${duration(spec.horizon_s)}` : "over") : "no end"],
    ["Last sync", isKnown(status.last_sync_s) ? `${duration(Math.max(0, now_s - status.last_sync_s))} ago` : "none yet"],
    ["Against the plan", againstPlan(status, ends_s, now_s)],
  ];
  const before = status.spent - spent_at_s.length;
  const spent = [{ t_s: status.started_s, value: Math.max(0, before) }, ...spent_at_s.map((t_s, at) => ({ t_s, value: before + at + 1 }))];
  const picture = {
    label: `Syncs spent since ${moment(status.started_s)}: ${status.spent}`,
    from_s: status.started_s,
    until_s: ends_s ?? Math.max(now_s, status.started_s + 60),
    now_s,
    spent,
    plan: isKnown(ends_s) ? spec.outer_syncs : null,
    fromLabel: moment(status.started_s),
    untilLabel: isKnown(ends_s) ? moment(ends_s) : "now",
  };
  const legend = isKnown(ends_s) ? [["line", "spent"], ["plan", "evenly until the end"]] : [["line", "spent"]];
  replaceTiles(byId("budget-facts"), facts);
  drawFigures(byId("budget-chart"), (width) => [figure("Outer syncs spent", budgetChart({ width, ...picture }), legend)]);
}

export const tile = (name, value, more) =>
  h("div", { class: "tile" }, h("dt", {}, name), h("dd", { class: value === "unknown" ? "unknown" : null }, value), more ? h("dd", {}, more) : null);

/** Tiles of [name, value, more], drawn anew only when one of them has changed. */
export function replaceTiles(place, facts) {
  const text = JSON.stringify(facts);
  if (place.shown === text) return;
  place.shown = text;
  place.replaceChildren(...facts.map(([name, value, more]) => tile(name, value, more)));
}

function againstPlan(status, ends_s, now_s) {
  if (!isKnown(ends_s)) return "no plan";
  const share = Math.min(1, Math.max(0, (now_s - status.started_s) / (ends_s - status.started_s)));
  const ahead = status.spent - share * status.spec.outer_syncs;
  if (Math.abs(ahead) < 1) return "even";
  return `${short(Math.abs(ahead))} ${ahead > 0 ? "ahead" : "behind"}`;
}

const RECOVERIES = {
  lease_lost: "bad",
  agent_gone: "bad",
  process_replaced: "warn",
  spare_took_slot: "warn",
  worker_restarted: "warn",
  controller_restarted: "warn",
  agent_returned: "good",
  trains_again: "good",
};

const RUNGS = { vault: "own vault", replica: "replica", global: "global parameters", disk: "disk", fresh: "nothing" };
const RECOVERY_PHASES = [
  ["detect", "lost_s", "detected_s"],
  ["fence", "detected_s", "taken_s"],
  ["fetch", "taken_s", "fetched_s"],
  ["load", "fetched_s", "loaded_s"],
  ["first step", "loaded_s", "first_step_s"],
];

function recoveryPath(row) {
  if (!isKnown(row.rung)) return "";
  const phases = RECOVERY_PHASES.filter(([, from, to]) => isKnown(row[from]) && isKnown(row[to]));
  const spans = phases.map(([name, from, to]) => `${name} ${duration(Math.max(0, row[to] - row[from]))}`);
  const lost = isKnown(row.steps_lost) ? `${row.steps_lost} steps lost` : "unknown how many steps lost";
  return ` from ${RUNGS[row.rung] ?? row.rung}, ${lost} (${spans.join(", ")})${row.detail ? `: ${row.detail}` : ""}`;
}

function recoveryDetail(row) {
  if (isKnown(row.first_step_s) && isKnown(row.lost_s)) return `after ${duration(row.first_step_s - row.lost_s)}${recoveryPath(row)}`;
  if (isKnown(row.taken_s) && isKnown(row.lost_s)) return `away for ${duration(row.taken_s - row.lost_s)}`;
  return isKnown(row.from_agent) && row.from_agent !== row.agent_id ? `from ${row.from_agent}` : "–";
}

export function recoveriesTable() {
  return new Table(byId("recoveries"), {
    caption: "What was lost and how it came back, newest first",
    key: (row) => `${row.recovery} ${row.kind} ${row.t_s}`,
    limit: 100,
    empty: "Nothing was lost yet.",
    columns: [
      { title: "When", head: true, text: (row) => moment(row.t_s) },
      { title: "What", text: (row) => words(row.kind), kind: (row) => RECOVERIES[row.kind] ?? "unknown" },
      { title: "Island", cell: "text", text: (row) => row.agent_id || "–" },
      { title: "Slot", num: true, text: (row) => (isKnown(row.slot) ? String(row.slot) : "none") },
      { title: "Detail", cell: "text", text: recoveryDetail },
    ],
  });
}

export function recoveriesNote(store) {
  const islands = [...store.islands.values()];
  const lost = islands.filter((row) => row.membership === "lost").length;
  const restarts = islands.reduce((total, row) => total + (row.restarts ?? 0), 0);
  setText(byId("recoveries-note"), `Without a lease now: ${lost}. Worker restarts that the islands tell of: ${restarts}.`);
}
