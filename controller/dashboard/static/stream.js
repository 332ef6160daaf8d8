// The events of the controller over fetch (an EventSource cannot send a token), for ever: it connects again by itself.

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 10_000;
/** Events come once a second and heartbeats every five: a connection that is silent for longer is dead. */
const SILENCE_MS = 12_000;

export class EventFeed {
  #lastId = null;
  #failures = 0;
  #abort = null;
  #timer = null;
  #watch = null;
  #wanted = false;

  /** `on.event(name, data)`, `on.open()`, `on.lost(why)`, `on.refused(status, body)`; `headers()` for each request. */
  constructor(url, { headers, on }) {
    this.url = url;
    this.headers = headers;
    this.on = on;
  }

  start() {
    this.#wanted = true;
    clearTimeout(this.#timer);
    if (!this.#abort) this.#run();
  }

  stop() {
    this.#wanted = false;
    clearTimeout(this.#timer);
    clearTimeout(this.#watch);
    const abort = this.#abort;
    this.#abort = null;
    abort?.abort();
  }

  async #run() {
    const abort = (this.#abort = new AbortController());
    let why = "the controller closed the connection";
    try {
      await this.#read(abort);
    } catch (error) {
      why = error instanceof Refusal ? error.message : "the controller cannot be reached";
    }
    abort.abort();
    if (this.#abort !== abort) return; // stopped: what it still heard is of before, and nobody's business
    clearTimeout(this.#watch);
    this.#abort = null;
    if (!this.#wanted) return;
    this.on.lost(why);
    const longest = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.#failures++);
    this.#timer = setTimeout(() => this.#run(), longest * (0.5 + Math.random() / 2));
  }

  async #read(abort) {
    this.#expectNews(abort);
    const headers = { Accept: "text/event-stream", ...this.headers() };
    if (this.#lastId) headers["Last-Event-ID"] = this.#lastId;
    const answer = await fetch(this.url, { headers, signal: abort.signal, cache: "no-store" });
    if (!answer.ok) {
      const body = await answer.json().catch(() => ({}));
      abort.signal.throwIfAborted();
      this.on.refused(answer.status, body);
      throw new Refusal(body.message ? `refused: ${body.message}` : `refused with HTTP ${answer.status}`);
    }
    abort.signal.throwIfAborted();
    this.on.open();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parse = parser((event) => this.#take(event));
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      abort.signal.throwIfAborted();
      this.#expectNews(abort);
      parse(value);
    }
  }

  #take({ id, name, data }) {
    this.on.event(name, JSON.parse(data));
    if (id) this.#lastId = id;
    this.#failures = 0;
  }

  #expectNews(abort) {
    clearTimeout(this.#watch);
    this.#watch = setTimeout(() => abort.abort(), SILENCE_MS);
  }
}

class Refusal extends Error {}

/** A function that takes pieces of an event stream and calls `emit` for each whole event. */
export function parser(emit) {
  let rest = "";
  let event = { id: null, name: "message", data: [] };
  const line = (text) => {
    if (text === "") {
      if (event.data.length) emit({ ...event, data: event.data.join("\n") });
      event = { id: null, name: "message", data: [] };
    } else if (!text.startsWith(":")) {
      const at = text.indexOf(":");
      const field = at < 0 ? text : text.slice(0, at);
      const value = at < 0 ? "" : text.slice(at + 1).replace(/^ /, "");
      if (field === "data") event.data.push(value);
      else if (field === "event") event.name = value;
      else if (field === "id") event.id = value;
    }
  };
  return (piece) => {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    lines.forEach(line);
  };
}
