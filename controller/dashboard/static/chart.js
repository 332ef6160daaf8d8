// Small line charts in SVG. Time runs to the right; what is unknown is a gap, not a zero.

import { h, svg } from "./dom.js";
import { isKnown, short } from "./format.js";

const HEIGHT = 176;
const LEFT = 44;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;

/** Places of a time and a value on the canvas. */
class Scale {
  constructor({ from_s, until_s, top, width, height = HEIGHT }) {
    Object.assign(this, { from_s, until_s, top: top > 0 ? top : 1, width, height });
  }

  x(t_s) {
    return LEFT + ((t_s - this.from_s) / (this.until_s - this.from_s)) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return this.height - BOTTOM - (value / this.top) * (this.height - TOP - BOTTOM);
  }
}

/** A path through the points whose value is known; broken where one is unknown or more than `gap_s` is missing. */
function path(scale, points, value, { gap_s = Infinity, steps = false } = {}) {
  let text = "";
  let last = null;
  for (const point of points) {
    const v = value(point);
    if (!isKnown(v) || point.t_s < scale.from_s) {
      last = isKnown(v) ? last : null;
      continue;
    }
    const [x, y] = [scale.x(point.t_s).toFixed(1), scale.y(v).toFixed(1)];
    const goesOn = last !== null && point.t_s - last <= gap_s;
    text += goesOn ? (steps ? `H${x}V${y}` : `L${x} ${y}`) : `M${x} ${y}`;
    last = point.t_s;
  }
  return text;
}

function band(scale, points, low, high) {
  const known = points.filter((point) => isKnown(low(point)) && isKnown(high(point)));
  if (known.length < 2) return "";
  const there = known.map((point) => `${scale.x(point.t_s).toFixed(1)} ${scale.y(high(point)).toFixed(1)}`);
  const back = known.toReversed().map((point) => `${scale.x(point.t_s).toFixed(1)} ${scale.y(low(point)).toFixed(1)}`);
  return `M${there.join("L")}L${back.join("L")}Z`;
}

function axes(scale, ticks, { values = true } = {}) {
  const parts = [];
  for (const share of values ? [0, 0.5, 1] : [0]) {
    const y = scale.y(scale.top * share);
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: scale.width - RIGHT, y1: y, y2: y }));
    if (values) parts.push(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(scale.top * share)));
  }
  ticks.forEach(({ t_s, label }, at) => {
    const x = scale.x(t_s);
    const anchor = at === ticks.length - 1 ? "end" : at === 0 ? "start" : "middle";
    parts.push(svg("text", { x, y: scale.height - 6, "text-anchor": anchor }, label));
  });
  return parts;
}

const canvas = (label, { width, height }) =>
  svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });

const niceTop = (value) => {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * unit).find((step) => step >= value * 1.02) ?? unit * 10;
};

const peak = (points, ...values) => Math.max(0, ...points.flatMap((p) => values.map((v) => v(p)).filter(isKnown)));

/** Observed until now, forecast after it: `ahead` has {t_s, low, mid, high}, low None where it is not forecast. */
export function forecastChart({ label, width, now_s, past_s, ahead_s, observed, ahead }) {
  const seen = observed.filter((point) => point.t_s >= now_s - past_s && point.t_s <= now_s);
  const top = niceTop(Math.max(peak(seen, (p) => p.value), peak(ahead, (p) => p.high, (p) => p.mid)));
  const scale = new Scale({ from_s: now_s - past_s, until_s: now_s + ahead_s, top, width });
  const ticks = [];
  const step_s = width < 420 ? 120 : 60;
  for (let back = past_s - (past_s % step_s); back > 0; back -= step_s) ticks.push({ t_s: now_s - back, label: `−${back / 60} min` });
  ticks.push({ t_s: now_s, label: "now" }, { t_s: now_s + ahead_s, label: `+${ahead_s} s` });
  const chart = canvas(label, scale);
  chart.append(
    ...axes(scale, ticks),
    svg("path", { class: "band", d: band(scale, ahead, (p) => p.low, (p) => p.high) }),
    svg("path", { class: "ahead", d: path(scale, ahead, (p) => p.mid) }),
    svg("path", { class: "edge", d: path(scale, ahead, (p) => p.high) }),
    svg("path", { class: "line", d: path(scale, seen, (p) => p.value, { gap_s: 25 }) }),
    svg("line", { class: "now", x1: scale.x(now_s), x2: scale.x(now_s), y1: TOP, y2: HEIGHT - BOTTOM }),
  );
  return chart;
}

/** Syncs spent as steps, against the plan that spends them evenly. */
export function budgetChart({ label, width, from_s, until_s, now_s, spent, plan, fromLabel, untilLabel }) {
  const total = Math.max(plan ?? 0, spent.at(-1)?.value ?? 0);
  const scale = new Scale({ from_s, until_s, top: niceTop(total), width });
  const ticks = [
    { t_s: from_s, label: fromLabel },
    { t_s: until_s, label: untilLabel },
  ];
  const chart = canvas(label, scale);
  chart.append(...axes(scale, ticks));
  if (isKnown(plan)) {
    const line = [
      { t_s: from_s, value: 0 },
      { t_s: until_s, value: plan },
    ];
    chart.append(svg("path", { class: "plan", d: path(scale, line, (p) => p.value) }));
  }
  const at_s = Math.min(now_s, until_s);
  chart.append(
    svg("path", { class: "line", d: path(scale, [...spent, { t_s: at_s, value: spent.at(-1)?.value ?? 0 }], (p) => p.value, { steps: true }) }),
    svg("line", { class: "now", x1: scale.x(at_s), x2: scale.x(at_s), y1: TOP, y2: HEIGHT - BOTTOM }),
  );
  return chart;
}

/** One bar per round, from its begin to its end, coloured by outcome. */
export function roundsChart({ label, width, from_s, until_s, rounds, fromLabel }) {
  const height = 72;
  const scale = new Scale({ from_s, until_s, top: 1, width, height });
  const chart = canvas(label, scale);
  chart.append(
    ...axes(scale, [{ t_s: from_s, label: fromLabel }, { t_s: until_s, label: "now" }], { values: false }),
    ...rounds.map((round) => {
      const x = scale.x(Math.max(from_s, round.began_s));
      const end = scale.x(Math.min(until_s, round.end_s));
      const tall = round.outcome === "applied" || round.outcome === "open" ? 0.9 : 0.6;
      const bar = { class: round.outcome, x, y: scale.y(tall), width: Math.max(3, end - x), height: scale.y(0) - scale.y(tall), rx: 1.5 };
      return svg("rect", bar, svg("title", {}, round.title));
    }),
  );
  return chart;
}

export function figure(caption, chart, legend = []) {
  const items = legend.map(([kind, text]) => h("li", { class: `l-${kind}` }, text));
  return h("figure", {}, h("figcaption", {}, caption), chart, items.length ? h("ul", { class: "legend" }, items) : null);
}

/** Fill a place with figures that are as wide as it lets them be: `make(width)` is asked again when it was wrong. */
export function drawFigures(place, make) {
  const room = () => Math.max(240, place.querySelector("figure")?.clientWidth || place.clientWidth);
  const width = room();
  place.replaceChildren(...make(width));
  if (room() !== width) place.replaceChildren(...make(room()));
}
