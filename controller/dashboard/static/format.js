// How values are written. A value that is unknown is "unknown", never 0 and never blank.

export const UNKNOWN = "unknown";

export const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);

const or = (value, write) => (isKnown(value) ? write(value) : UNKNOWN);

export const whole = (value) => or(value, (v) => Math.round(v).toLocaleString("en-US"));

/** Three digits that count, however large or small. */
export const short = (value) =>
  or(value, (v) => {
    const size = Math.abs(v);
    if (size === 0) return "0";
    if (size >= 1e6) return `${trim((v / 1e6).toPrecision(3))} M`;
    if (size >= 1e4) return `${trim((v / 1e3).toPrecision(3))} k`;
    if (size < 1e-3) return v.toExponential(1);
    return trim(v.toPrecision(size >= 1000 ? 4 : 3));
  });

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);

export const percent = (value) => or(value, (v) => `${(v * 100).toFixed(v > 0 && v < 0.1 ? 1 : 0)} %`);

export const bytes = (value) =>
  or(value, (v) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (v >= 1000 && at < units.length - 1) [v, at] = [v / 1000, at + 1];
    return `${at ? v.toPrecision(3) : v} ${units[at]}`;
  });

export const duration = (value) =>
  or(value, (v) => {
    const s = Math.abs(v);
    const sign = v < 0 ? "−" : "";
    if (s < 0.0995) return `${sign}${Math.round(s * 1000)} ms`;
    if (s < 9.95) return `${sign}${s.toFixed(1)} s`;
    if (s < 119.5) return `${sign}${Math.round(s)} s`;
    if (s < 7200) return `${sign}${Math.floor(s / 60)} min ${pad(Math.floor(s % 60))} s`;
    if (s < 172800) return `${sign}${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} min`;
    return `${sign}${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  });

/** Ages change every second: no more digits than somebody reads. */
export const age = (value) => or(value, (v) => (v < 9.95 ? `${Math.floor(Math.max(0, v))} s` : duration(v)));

const pad = (value) => String(value).padStart(2, "0");

export const clock = (unix_s) =>
  or(unix_s, (v) => {
    const at = new Date(v * 1000);
    return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  });

export const moment = (unix_s) =>
  or(unix_s, (v) => {
    const at = new Date(v * 1000);
    const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
    return at.toDateString() === new Date().toDateString() ? clock(v) : `${day} ${clock(v)}`;
  });

export const words = (name) => or(name, (v) => String(v).replaceAll("_", " "));

/** "1 round", "2 rounds". */
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export const list = (values) => (values.length ? compress(values) : "none");

/** 0, 1, 2, 5 → "0–2, 5". */
function compress(values) {
  const runs = [];
  for (const value of values) {
    const last = runs.at(-1);
    if (last && value === last[1] + 1) last[1] = value;
    else runs.push([value, value]);
  }
  const shown = runs.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
  return shown.length > 12 ? `${shown.slice(0, 12).join(", ")} … (${values.length})` : shown.join(", ");
}
