// Headroom: what better moments for syncs could save, as the controller measures it on the recent window.

import { byId, h } from "./dom.js";
import { duration, isKnown, percent, short, whole, words } from "./format.js";
import { tile } from "./history.js";

const VERDICTS = {
  enough: "Timing pays here: the best schedule costs clearly less than random ones, and the load can be told a moment ahead.",
  unpredictable: "The best schedule costs less, but only in hindsight: the load cannot be told ahead.",
  nothing_to_gain: "There is nothing to gain here: the best schedule saves no more than noise over random ones.",
  too_little_data: "Not known yet: the cost of a sync is known for too few seconds.",
  no_budget: "Not known: without a budget, and without a sync so far, nobody can say how many syncs to place.",
};

/** `get(path)` fetches JSON. */
export async function showHeadroom(get) {
  const place = byId("headroom");
  try {
    place.replaceChildren(...draw(await get("/v1/headroom")));
  } catch (error) {
    place.replaceChildren(h("p", { class: "empty" }, `Not known: ${error.message}.`));
  }
}

function draw(told) {
  const verdict = h("p", { class: "note" }, VERDICTS[told.verdict] ?? words(told.verdict));
  const tiles = [
    ["Window", duration(told.covered_s), isKnown(told.window_s) ? `of ${duration(told.window_s)} known` : null],
    ["Random schedules", short(told.random_cost), "violations added"],
    ["Best schedule", short(told.oracle_cost), "in hindsight"],
    ["Gap", short(told.gap), isKnown(told.syncs) ? `over ${whole(told.syncs)} syncs` : null],
    ["Predictability", isKnown(told.predictability) ? told.predictability.toFixed(2) : "unknown", "0 is none, 1 all"],
  ];
  return [verdict, h("dl", { class: "tiles" }, tiles.map((facts) => tile(...facts))), policies(told.policies ?? [])];
}

function policies(rows) {
  if (!rows.length) return h("p", { class: "empty" }, "No policy has been measured yet.");
  const titles = ["Policy", "Syncs", "Cost", "Random", "Best", "Gap closed"];
  const head = h("tr", {}, titles.map((title, at) => h("th", { scope: "col", class: at ? "num" : null }, title)));
  const lines = rows.map((row) => {
    const cells = [whole(row.syncs), short(row.cost), short(row.random_cost), short(row.oracle_cost), percent(row.share_closed)];
    return h("tr", {}, h("th", { scope: "row" }, row.shadow ? `${row.policy} (shadow)` : row.policy), cells.map((text) => h("td", { class: text === "unknown" ? "num unknown" : "num" }, text)));
  });
  const table = h("table", {}, h("caption", {}, "What each policy's syncs cost, against random and best schedules"), h("thead", {}, head), h("tbody", {}, lines));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Headroom by policy" }, table);
}
