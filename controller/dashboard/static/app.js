// The page: follows the events, and draws once per event and once a second.

import { byId, setClass, setText } from "./dom.js";
import { clock, count, isKnown, percent, whole, words, short } from "./format.js";
import { islandsTable, serversTable, sloNote, sloTable } from "./fleet.js";
import { budgetLeft, decisionsTable, drawBudget, drawRounds, newestDecisions, presentDecision, recoveriesNote, recoveriesTable, replaceTiles, roundsTable } from "./history.js";
import { showHeadroom } from "./headroom.js";
import { LoadPanel } from "./load.js";
import { Controls, ask, authorization } from "./operator.js";
import { presentReason } from "./reasons.js";
import { Store } from "./store.js";
import { EventFeed } from "./stream.js";

/** Data older than this is stale: three ticks did not come. */
const STALE_AFTER_S = 3.5;
/** Ages grow when no events come, too. */
const DRAW_EVERY_MS = 1200;
const SEARCH_EVERY_MS = 2000;
const HEADROOM_EVERY_MS = 15_000;
const HIDDEN_FOR_MS = 30_000;
const ROWS_SHOWN = 200;
const CONNECTING = "connecting";

const store = new Store();
const load = new LoadPanel(ask);
const tables = {
  servers: serversTable((name) => load.choose(name), () => load.chosen),
  islands: islandsTable(),
  decisions: decisionsTable(() => store.run),
  rounds: roundsTable(),
  slo: sloTable(),
  recoveries: recoveriesTable(),
};
let link = { isOpen: false, why: CONNECTING };
let found = null;
let drawn_ms = 0;

const controls = new Controls({
  onToken: () => {
    link = { isOpen: false, why: CONNECTING };
    feed.stop();
    setTimeout(() => feed.start(), 0);
  },
});

const feed = new EventFeed("/v1/events", {
  headers: authorization,
  on: {
    open: () => {
      link = { isOpen: true, why: "" };
      askHeadroom();
    },
    event: (name, frame) => {
      store.apply(name, frame);
      draw();
      load.refresh();
    },
    lost: (why) => {
      link = { ...link, isOpen: false, why };
      draw();
    },
    refused: (status) => {
      const isFirst = link.status !== status;
      link = { isOpen: false, why: "", status };
      if (status === 401 && isFirst) controls.askToken("The controller asks for its token, or the one given is wrong. It stays in this tab and is gone when the tab closes.");
    },
  },
});

const filter = byId("filter");
filter.addEventListener("input", () => {
  found = null;
  search();
  draw();
});
load.onChosen = () => {
  load.refresh().then(draw);
  draw();
};
for (const table of Object.values(tables)) table.onSort = draw;

function draw() {
  drawn_ms = performance.now();
  const now_s = store.now_s();
  const data_age_s = isKnown(now_s) ? now_s - store.t_s : null;
  const isStale = !link.isOpen || !isKnown(data_age_s) || data_age_s > STALE_AFTER_S;
  drawLink(isStale);
  controls.update({ isLive: store.hasData && !isStale, isPaused: store.run?.paused ?? false });
  if (!store.hasData) return;
  document.body.classList.toggle("stale", isStale);
  drawNow();
  drawFleet(now_s);
  drawHistory(now_s);
  load.offer([...store.servers.values()]);
  load.draw(store, now_s);
}

function drawLink(isStale) {
  const state = byId("link-state");
  const banner = byId("banner");
  if (!isStale) {
    setText(state, store.run.paused ? "paused" : "live");
    setClass(state, `pill ${store.run.paused ? "pill-warn" : "pill-good"}`);
    setText(banner, store.run.journal_failure ? `The journal cannot be written: ${store.run.journal_failure}` : "");
    setClass(banner, store.run.journal_failure ? "banner banner-bad" : "banner");
    return;
  }
  setText(state, store.hasData ? "stale" : "no data");
  setClass(state, "pill pill-bad");
  setClass(banner, "banner banner-bad");
  if (!store.hasData && (link.isOpen || link.why === CONNECTING)) return;
  const last = store.hasData ? `Last data from ${clock(store.t_s)}.` : "No data yet.";
  const why = link.why || "no news";
  setText(banner, `Connection lost (${why}). ${last} What is shown is old; the page connects again by itself.`);
}

function drawNow() {
  const { run, totals, budget } = store;
  setText(byId("run-id"), run.run_id);
  document.title = `${run.paused ? "paused · " : ""}WA-DiLoCo ${run.run_id}`;
  const decision = presentDecision(newestDecisions(store));
  setText(byId("why"), run.paused ? "The run is paused: no training, no syncs, until somebody resumes it." : presentReason(decision, run));
  const alive = [...store.islands.values()].filter((row) => row.membership === "active" && isKnown(row.slot));
  const steps = alive.filter((row) => row.current && isKnown(row.h)).map((row) => row.h);
  const spec = budget.status.spec;
  replaceTiles(byId("tiles"), [
    ["Policy", words(run.policy.name), Object.entries(run.policy.params).map(([name, value]) => `${name} ${short(value)}`).join(", ")],
    ["Servers", whole(totals.servers), totals.servers_unknown ? `${whole(totals.servers_unknown)} unknown` : "all known"],
    ["Islands", `${totals.islands_alive} of ${run.num_slots}`, `${count(totals.agents, "agent")}, epoch ${run.epoch}`],
    ["H", steps.length ? whole(Math.min(...steps)) : "unknown", `least ${run.min_h}, most ${run.max_h}`],
    ["Pressure", percent(decision?.terms.pressure), "highest of the bound servers"],
    ["Round", whole(run.round), `${count(run.rounds_closed, "outer step")} counted`],
    ["Budget", isKnown(spec.outer_syncs) ? `${budgetLeft(budget.status)} left` : budgetLeft(budget.status), `${whole(budget.status.spent)} spent`],
  ]);
}

function drawFleet(now_s) {
  const wanted = filter.value.trim().toLowerCase();
  const matches = (...names) => names.some((name) => name?.toLowerCase().includes(wanted));
  const all = { servers: [...store.servers.values()], islands: [...store.islands.values()] };
  // Of a large fleet not all rows are here: then the controller looks for them.
  const servers = found?.servers ?? all.servers.filter((row) => matches(row.server_id, row.node));
  const islands = found?.islands ?? all.islands.filter((row) => matches(row.agent_id, row.node, row.server_id));
  const shown = { servers: tables.servers.update(servers, now_s), islands: tables.islands.update(islands, now_s) };
  setText(byId("servers-note"), fleetNote("servers", shown.servers, found?.servers_found ?? servers.length, store.totals.servers, wanted, ", unknown and highest pressure first"));
  setText(byId("islands-note"), fleetNote("agents", shown.islands, found?.islands_found ?? islands.length, store.totals.agents, wanted, ", lost ones first"));
  tables.slo.update(servers);
  sloNote(servers);
}

function fleetNote(name, shown, matching, total, wanted, order) {
  if (wanted) return `${whole(shown)} of ${whole(matching)} ${name} that match “${wanted}” (${whole(total)} in all).`;
  return shown < total ? `The first ${whole(shown)} of ${whole(total)} ${name}${order}. The filter finds the others.` : "";
}

function drawHistory(now_s) {
  tables.decisions.update(newestDecisions(store));
  tables.rounds.update([...store.rounds.values()].sort((a, b) => b.id - a.id), now_s);
  tables.recoveries.update([...store.recoveries.values()].sort((a, b) => b.t_s - a.t_s));
  recoveriesNote(store);
  drawRounds(store, now_s);
  drawBudget(store, now_s);
}

const askHeadroom = () => link.isOpen && showHeadroom(ask);

const isTruncated = () => store.totals && (store.totals.servers > store.totals.server_rows || store.totals.agents > store.totals.island_rows);

/** Look for the filter's text at the controller, where this page has not all rows. */
async function search() {
  const wanted = filter.value.trim();
  if (!wanted || !isTruncated() || !link.isOpen) {
    found = null;
    return;
  }
  const rows = await ask(`/v1/fleet/rows?contains=${encodeURIComponent(wanted)}&limit=${ROWS_SHOWN}`).catch(() => null);
  if (wanted === filter.value.trim()) found = rows;
}

/** A hidden tab needs no news, and a browser has few connections for one address. */
let hidden = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(() => feed.stop(), HIDDEN_FOR_MS);
  else feed.start();
});

setInterval(() => performance.now() - drawn_ms >= DRAW_EVERY_MS && draw(), DRAW_EVERY_MS / 4);
setInterval(() => search().then(() => found && draw()), SEARCH_EVERY_MS);
setInterval(askHeadroom, HEADROOM_EVERY_MS);
feed.start();
