// Tables that change in place: a cell is touched when its text changes, a row when its cells do.

import { h, setClass, setText } from "./dom.js";
import { UNKNOWN, isKnown } from "./format.js";

/** Rows keep their places for so long, so that one can read and click them. */
const RESORT_MS = 5000;

/**
 * A column is {title, text(row, context), sort?(row), kind?, num?, head?, show?(cell, row, text)}.
 * `kind(row)` colours the cell as a pill; `show` fills it with elements, and is called only when its text has changed.
 */
export class Table {
  #rows = new Map();
  #sorted_ms = -Infinity;
  #order = [];

  constructor(place, { caption, columns, key, sort, limit = 200, empty, rowClass = () => "" }) {
    Object.assign(this, { columns, key, limit, rowClass });
    this.sort = sort; // {column, descending} or null: the order in which rows are given
    this.heads = columns.map((column, at) => this.#head(column, at));
    this.body = h("tbody");
    this.table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, this.heads)), this.body);
    this.empty = h("p", { class: "empty" }, empty);
    place.append(this.table, this.empty);
    place.tabIndex = 0;
    place.setAttribute("role", "region");
    place.setAttribute("aria-label", caption);
    this.place = place;
    this.#markSort();
  }

  /** Show these rows; returns how many of them fit. */
  update(rows, context) {
    const shown = this.#pick(rows);
    const wanted = new Set(shown.map(this.key));
    for (const [key, line] of this.#rows) {
      if (!wanted.has(key)) {
        line.element.remove();
        this.#rows.delete(key);
      }
    }
    let place = this.body.firstChild;
    for (const row of shown) {
      const line = this.#line(row, context);
      if (line.element === place) place = place.nextSibling;
      else this.body.insertBefore(line.element, place);
    }
    this.table.hidden = shown.length === 0;
    this.empty.hidden = shown.length > 0;
    return shown.length;
  }

  resort() {
    this.#sorted_ms = -Infinity;
  }

  #pick(rows) {
    if (!this.sort) return rows.slice(0, this.limit);
    const now = performance.now();
    const busy = this.body.matches(":hover") || this.body.contains(document.activeElement);
    const byKey = new Map(rows.map((row) => [this.key(row), row]));
    const isSame = this.#order.every((key) => byKey.has(key)) && this.#order.length === Math.min(rows.length, this.limit);
    const isAsked = this.#sorted_ms === -Infinity;
    if (!isSame || isAsked || (now - this.#sorted_ms >= RESORT_MS && !busy)) {
      this.#sorted_ms = now;
      const sorted = [...rows].sort(this.#compare());
      this.#order = sorted.slice(0, this.limit).map(this.key);
    }
    return this.#order.map((key) => byKey.get(key));
  }

  #compare() {
    const { column, descending } = this.sort;
    const value = this.columns[column].sort ?? this.columns[column].text;
    const sign = descending ? -1 : 1;
    return (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === y) return this.key(a) < this.key(b) ? -1 : 1;
      // Unknown is full, hence the highest there is.
      if (!isKnown(x) || !isKnown(y)) return (isKnown(x) ? -1 : 1) * sign;
      return (x < y ? -1 : 1) * sign;
    };
  }

  #line(row, context) {
    const key = this.key(row);
    let line = this.#rows.get(key);
    if (!line) {
      const cells = this.columns.map((column) =>
        column.head ? h("th", { scope: "row" }) : h("td", { class: column.num ? "num" : column.cell }),
      );
      line = { element: h("tr", {}, cells), cells, texts: [], kinds: [] };
      this.#rows.set(key, line);
    }
    setClass(line.element, this.rowClass(row));
    this.columns.forEach((column, at) => this.#cell(line, at, column, row, context));
    return line;
  }

  #cell(line, at, column, row, context) {
    const text = column.text(row, context);
    const kind = column.kind?.(row, context) ?? (text === UNKNOWN ? "unknown" : "");
    if (line.texts[at] === text && line.kinds[at] === kind) return;
    const cell = line.cells[at];
    [line.texts[at], line.kinds[at]] = [text, kind];
    if (column.show && text !== UNKNOWN) column.show(cell, row, text, context);
    else if (column.kind && kind) cell.replaceChildren(h("span", { class: `pill pill-${kind}` }, text));
    else {
      setText(cell, text);
      cell.classList.toggle("unknown", text === UNKNOWN);
      if (column.cell === "text" || column.head) cell.title = text;
    }
  }

  #head(column, at) {
    const attributes = { scope: "col", class: column.num ? "num" : null };
    if (!this.sort || column.fixed) return h("th", attributes, column.title);
    return h("th", attributes, h("button", { type: "button", onclick: () => this.#sortBy(at) }, column.title));
  }

  #sortBy(at) {
    const again = this.sort.column === at;
    this.sort = { column: at, descending: again ? !this.sort.descending : Boolean(this.columns[at].num) };
    this.resort();
    this.#markSort();
    this.onSort?.();
  }

  #markSort() {
    if (!this.sort) return;
    this.heads.forEach((head, at) => {
      if (at === this.sort.column) head.setAttribute("aria-sort", this.sort.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }
}

/** A bar and its number. */
export function meter(part) {
  return (cell, row, text) => {
    let fill = cell.querySelector(".fill");
    if (!fill) {
      fill = h("span", { class: "fill" });
      cell.classList.remove("unknown");
      cell.replaceChildren(
        h("span", { class: "meter" }, h("span", { class: "track", "aria-hidden": "true" }, fill), h("span", { class: "num" })),
      );
    }
    const value = part(row);
    fill.style.setProperty("--part", String(Math.min(1, Math.max(0, value))));
    setClass(fill, value >= 0.9 ? "fill hot" : "fill");
    setText(cell.querySelector(".num"), text);
  };
}
