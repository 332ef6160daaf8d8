// What is known of the fleet: a snapshot begins it anew, a tick replaces the rows that changed.

const KEPT = { decisions: 300, rounds: 200, recoveries: 300, points: 420 };

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.t_s = null;
    this.seenAt_ms = null;
    this.run = this.totals = this.budget = null;
    this.servers = new Map();
    this.islands = new Map();
    this.decisions = new Map();
    this.rounds = new Map();
    this.recoveries = new Map();
    /** server_id → what its samples said while this page looked on, once a second. */
    this.points = this.points ?? new Map();
  }

  get hasData() {
    return this.run !== null;
  }

  /** The controller's time now: its last word, carried on by this machine's clock. */
  now_s() {
    return this.t_s === null ? null : this.t_s + (performance.now() - this.seenAt_ms) / 1000;
  }

  apply(name, frame) {
    if (name === "snapshot") this.clear();
    else if (name !== "tick") return;
    this.t_s = frame.t_s;
    this.seenAt_ms = performance.now();
    for (const part of ["run", "totals", "budget"]) this[part] = frame[part] ?? this[part];
    put(this.servers, "server_id", frame.servers, frame.servers_gone);
    put(this.islands, "agent_id", frame.islands, frame.islands_gone);
    put(this.decisions, "first_id", frame.decisions);
    put(this.rounds, "id", frame.rounds);
    for (const row of frame.recoveries) this.recoveries.set(`${row.recovery} ${row.kind} ${row.t_s}`, row);
    for (const part of ["decisions", "rounds", "recoveries"]) trim(this[part], KEPT[part]);
    for (const row of frame.servers) this.#notePoint(row);
    for (const name of this.points.keys()) if (!this.servers.has(name)) this.points.delete(name);
  }

  #notePoint(row) {
    const points = this.points.get(row.server_id) ?? [];
    this.points.set(row.server_id, points);
    const known = row.running !== null && row.waiting !== null;
    if (points.length && points.at(-1).t_s >= row.t_s) return;
    points.push({ t_s: row.t_s, in_engine: known ? row.running + row.waiting : null, arrivals_per_s: row.arrivals_per_s });
    if (points.length > KEPT.points) points.splice(0, points.length - KEPT.points);
  }
}

function put(rows, key, changed, gone = []) {
  for (const name of gone) rows.delete(name);
  for (const row of changed) {
    rows.delete(row[key]); // to the end: the order is that of the last change
    rows.set(row[key], row);
  }
}

function trim(rows, kept) {
  for (const key of rows.keys()) {
    if (rows.size <= kept) return;
    rows.delete(key);
  }
}
