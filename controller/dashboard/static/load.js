// The load of one chosen server: what was observed, and what its sidecar expects.

import { drawFigures, figure, forecastChart } from "./chart.js";
import { byId, h, setText } from "./dom.js";
import { age, isKnown, percent, short } from "./format.js";

const PAST_S = 300;
const AHEAD_S = 60;
const MOST_OPTIONS = 500;

export class LoadPanel {
  chosen = null;
  #history = null;
  #isAsking = false;
  #error = null;
  #names = "";

  /** `get(path)` fetches JSON with the token. */
  constructor(get) {
    this.get = get;
    this.select = byId("chosen");
    this.select.addEventListener("change", () => this.choose(this.select.value));
  }

  choose(server_id) {
    this.chosen = server_id;
    this.#history = this.#error = null;
    this.select.value = server_id;
    this.onChosen?.();
  }

  /** Which servers there are; the first choice is the one under the highest pressure that is known. */
  offer(rows) {
    if (this.chosen === null && rows.length) {
      const loaded = [...rows].sort((a, b) => (b.known ? b.pressure_frac : -1) - (a.known ? a.pressure_frac : -1));
      this.choose(loaded[0].server_id);
    }
    const names = rows.map((row) => row.server_id).sort().slice(0, MOST_OPTIONS);
    if (this.chosen !== null && !names.includes(this.chosen)) names.unshift(this.chosen);
    if (names.join("\n") === this.#names) return;
    this.#names = names.join("\n");
    this.select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    this.select.value = this.chosen ?? "";
  }

  /** Ask for the newest, unless the last question is still open. */
  async refresh() {
    if (this.chosen === null || this.#isAsking) return;
    this.#isAsking = true;
    const asked = this.chosen;
    try {
      const history = await this.get(`/v1/history?server_id=${encodeURIComponent(asked)}`);
      if (asked === this.chosen) [this.#history, this.#error] = [history, null];
    } catch (error) {
      if (asked === this.chosen) this.#error = error.message;
    } finally {
      this.#isAsking = false;
    }
  }

  draw(store, now_s) {
    const place = byId("load");
    if (this.chosen === null) {
      setText(byId("load-note"), "No server yet.");
      return;
    }
    if (this.#history === null) {
      setText(byId("load-note"), this.#error ? `Not known: ${this.#error}.` : "Asking the controller.");
      place.replaceChildren();
      return;
    }
    const { forecast, forecast_t_s } = this.#history;
    const observed = this.#observed(store.points.get(this.chosen) ?? []);
    setText(byId("load-note"), note(this.#history, now_s, store.run?.stale_after_s));
    const points = forecast.map((point) => ({ ...point, t_s: forecast_t_s + point.horizon_s })).filter((point) => point.t_s >= now_s - 5);
    drawFigures(place, (width) => [arrivalsFigure(width, observed, points, now_s), engineFigure(width, observed, points, now_s)]);
  }

  /** Second by second for as long as this page looked on, before that in the controller's bins. */
  #observed(points) {
    const first_s = points.length ? points[0].t_s : Infinity;
    return [...this.#history.bins.filter((bin) => bin.t_s < first_s), ...points];
  }
}

function note({ sample, forecast }, now_s, stale_after_s) {
  const old_s = now_s - sample.t_s;
  const parts = [`Newest sample ${age(old_s)} old${isKnown(stale_after_s) && old_s > stale_after_s ? ": too old, the load is unknown" : ""}.`];
  if (!forecast.length) parts.push("No forecast yet.");
  const last = forecast.at(-1);
  if (last && isKnown(last.burst_probability)) parts.push(`A burst within ${short(last.horizon_s)} s: ${percent(last.burst_probability)} likely.`);
  const costs = sample.sync_costs_ahead;
  if (costs.length) {
    const best = costs.reduce((least, cost) => (cost.violations < least.violations ? cost : least));
    parts.push(`A sync of one second costs ${short(costs[0].violations)} violations now, and least in ${short(best.start_s)} s: ${short(best.violations)}.`);
  }
  return parts.join(" ");
}

function arrivalsFigure(width, observed, points, now_s) {
  const ahead = points.map((p) => ({ t_s: p.t_s, low: p.arrivals_per_s_q10, mid: p.arrivals_per_s_q50, high: p.arrivals_per_s_q90 }));
  const label = "Requests that arrive per second: observed over five minutes, and the forecast of the next minute";
  const chart = forecastChart({ label, width, now_s, past_s: PAST_S, ahead_s: AHEAD_S, observed: observed.map((p) => ({ t_s: p.t_s, value: p.arrivals_per_s })), ahead });
  return figure("Arrivals per second", chart, [["line", "observed"], ["ahead", "forecast, median"], ["band", "10 % to 90 %"]]);
}

function engineFigure(width, observed, points, now_s) {
  const ahead = points.map((p) => ({ t_s: p.t_s, low: null, mid: p.running, high: p.running_q90 }));
  const label = "Requests in the engine, running and waiting: observed over five minutes, and the forecast of the next minute";
  const chart = forecastChart({ label, width, now_s, past_s: PAST_S, ahead_s: AHEAD_S, observed: observed.map((p) => ({ t_s: p.t_s, value: p.in_engine })), ahead });
  return figure("Requests in the engine", chart, [["line", "observed"], ["ahead", "forecast, mean and 90 %"]]);
}
