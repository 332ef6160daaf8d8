// Servers, islands and the SLO: rows of the fleet.

import { age, duration, isKnown, percent, short, whole, words, UNKNOWN } from "./format.js";
import { byId, h, setText } from "./dom.js";
import { Table, meter } from "./table.js";

const PHASES = { inner: "run", sync: "warn", none: "", starting: "", paused: "warn", stopped: "bad" };
const MEMBERSHIPS = { active: "good", lost: "bad", left: "unknown" };
const STATES = { ready: "good", sleeping: "unknown", starting: "warn", draining: "warn", stale: "bad", stalled: "bad", down: "bad", metrics_disabled: "bad" };
/** Burn rate at which Google's SRE book pages somebody. */
const FAST_BURN = 14.4;

/** A row of a server whose load is unknown tells old numbers: only its state and age still hold. */
const live = (value) => (row) => (row.known ? value(row) : null);

/** `choose(server_id)` is called when somebody wants to see a server's load. */
export function serversTable(choose, chosen) {
  const name = (cell, row, text) => {
    const button = { type: "button", title: `${text}: show its load`, onclick: () => choose(row.server_id) };
    cell.replaceChildren(h("button", button, text));
  };
  return new Table(byId("servers"), {
    caption: "Servers: state, load, pressure, gate and age of the newest sample",
    key: (row) => row.server_id,
    sort: { column: 4, descending: true },
    empty: "No server has sent a sample yet. Start a sidecar beside a vLLM server, with --controller and this address.",
    rowClass: (row) => (row.server_id === chosen() ? "chosen" : ""),
    columns: [
      { title: "Server", head: true, text: (row) => row.server_id, show: name },
      { title: "State", text: (row) => words(row.state), kind: (row) => STATES[row.state] ?? "unknown" },
      { title: "Load", text: (row) => (row.known ? "known" : UNKNOWN), kind: (row) => (row.known ? "good" : "bad"), sort: (row) => row.known },
      { title: "Age", num: true, sort: (row) => -row.t_s, text: (row, now_s) => age(now_s - row.t_s) },
      { title: "Pressure", num: true, sort: live((row) => row.pressure_frac), text: (row) => percent(live((r) => r.pressure_frac)(row)), show: meter((row) => row.pressure_frac) },
      ...numbers([
        ["Running", (row) => row.running, whole],
        ["Waiting", (row) => row.waiting, whole],
        ["KV", (row) => row.kv_usage_frac, percent],
        ["Arrivals/s", (row) => row.arrivals_per_s, short],
        ["Sync cost/s", (row) => row.sync_cost_per_s, short],
        ["Pace", (row) => row.pace, percent],
      ], live),
      { title: "Gate", text: live((row) => gateText(row)), kind: (row) => (row.known && isKnown(row.gate_busy) ? (row.gate_busy ? "warn" : "good") : "unknown"), sort: (row) => row.gate_reason },
      { title: "Trainer", text: (row) => words(live((r) => r.trainer_phase)(row)), kind: (row) => (row.known && row.trainer_phase ? PHASES[row.trainer_phase] : "unknown") },
      { title: "Node", cell: "text", text: (row) => row.node },
    ].map((column) => ({ ...column, text: (row, context) => column.text(row, context) ?? UNKNOWN })),
  });
}

const numbers = (columns, wrap) => columns.map(([title, value, write]) => ({ title, num: true, sort: wrap(value), text: (row) => write(wrap(value)(row)) }));

const gateText = (row) => {
  if (!isKnown(row.gate_busy)) return null;
  return row.gate_busy ? `wait: ${words(row.gate_reason)}` : "free";
};

export function islandsTable() {
  const plain = (value) => value;
  return new Table(byId("islands"), {
    caption: "Islands and spares: slot, lease, progress and phase",
    key: (row) => row.agent_id,
    sort: { column: 1, descending: false },
    empty: "No agent has registered yet. Start one with wadiloco island and --controller.",
    columns: [
      { title: "Island", head: true, text: (row) => row.agent_id },
      { title: "Slot", num: true, sort: (row) => row.slot, text: (row) => (isKnown(row.slot) ? String(row.slot) : row.membership === "active" ? "spare" : "none") },
      { title: "Lease", text: (row) => (row.membership === "active" ? "alive" : row.membership), kind: (row) => MEMBERSHIPS[row.membership] },
      { title: "Phase", text: (row) => words(row.phase), kind: (row) => (row.phase ? PHASES[row.phase] : "unknown") },
      ...numbers([
        ["Step", (row) => row.step, whole],
        ["H", (row) => (row.current ? row.h : null), whole],
        ["Loss", (row) => row.loss, short],
        ["At sync", (row) => row.loss_at_sync, short],
        ["Step time", (row) => row.step_time_s, duration],
        ["Round", (row) => row.round, whole],
      ], plain),
      { title: "Yields", text: (row) => yieldText(row), kind: (row) => (row.yield_reason ? "warn" : ""), sort: (row) => row.yield_reason ?? "" },
      { title: "Beat", num: true, sort: (row) => -row.beat_s, text: (row, now_s) => age(now_s - row.beat_s) },
      { title: "Server", cell: "text", text: (row) => row.server_id ?? "by node" },
      { title: "Node", cell: "text", text: (row) => row.node },
      { title: "Epoch", num: true, text: (row) => String(row.epoch), sort: (row) => row.epoch },
    ],
  });
}

function yieldText(row) {
  if (row.yield_reason) return `waits: ${words(row.yield_reason)}`;
  return isKnown(row.yielded_s) ? `no, ${duration(row.yielded_s)} in all` : "no gate";
}

/** The violation rate of a window; None while nothing was judged. */
const rate = (violations, requests) => (requests > 0 ? violations / requests : null);
const burn = (row) => {
  const misses = rate(row.slo_violations_5m, row.slo_requests_5m);
  return isKnown(misses) && isKnown(row.slo_target_frac) ? misses / (1 - row.slo_target_frac) : null;
};
const burnKind = (row) => {
  const value = burn(row);
  if (!isKnown(value)) return "unknown";
  return value >= FAST_BURN ? "bad" : value > 1 ? "warn" : "good";
};

export function sloTable() {
  return new Table(byId("slo"), {
    caption: "SLO per server: share of requests that missed it, against the target",
    key: (row) => row.server_id,
    sort: { column: 1, descending: true },
    empty: "No server has sent a sample yet.",
    columns: [
      { title: "Server", head: true, text: (row) => row.server_id },
      { title: "Burn, 5 min", num: true, sort: (row) => burn(row) ?? -1, text: (row) => (isKnown(burn(row)) ? `${short(burn(row))} ×` : UNKNOWN), kind: burnKind },
      { title: "Missed, 1 min", num: true, sort: (row) => rate(row.slo_violations_1m, row.slo_requests_1m) ?? -1, text: (row) => percent(rate(row.slo_violations_1m, row.slo_requests_1m)) },
      { title: "Missed, 5 min", num: true, sort: (row) => rate(row.slo_violations_5m, row.slo_requests_5m) ?? -1, text: (row) => percent(rate(row.slo_violations_5m, row.slo_requests_5m)) },
      { title: "Allowed", num: true, text: (row) => percent(isKnown(row.slo_target_frac) ? 1 - row.slo_target_frac : null), sort: (row) => row.slo_target_frac ?? -1 },
      { title: "Requests, 5 min", num: true, text: (row) => whole(row.slo_requests_5m), sort: (row) => row.slo_requests_5m ?? -1 },
    ],
  });
}

export function sloNote(rows) {
  const judged = rows.filter((row) => row.slo_requests_5m > 0);
  const [missed, requests] = [sum(judged, "slo_violations_5m"), sum(judged, "slo_requests_5m")];
  const all = requests > 0 ? `All servers shown: ${whole(missed)} of ${whole(requests)} requests missed the SLO within five minutes (${percent(missed / requests)}). ` : "";
  setText(byId("slo-note"), `${all}Certain violations only. A burn over 1 × spends more than the target allows.`);
}

const sum = (rows, field) => rows.reduce((total, row) => total + row[field], 0);

