// What an operator does: pause, resume, sync now, and the token that the controller asks for.

import { byId, h, setText } from "./dom.js";

const TOKEN_KEY = "wadiloco-token";

const ORDERS = {
  pause: { button: "pause", title: "Pause the run?", text: "All islands stop training and nothing syncs until somebody resumes the run.", yes: "Pause" },
  resume: { button: "resume", title: "Resume the run?", text: "All islands train and sync again.", yes: "Resume" },
  sync_now: { button: "sync-now", title: "Sync now?", text: "All islands sync at once, whatever the load is. It spends one sync of the budget.", yes: "Sync now" },
};

/** The token, for as long as the tab lives; never in the address. */
export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY),
  set: (value) => (value ? sessionStorage.setItem(TOKEN_KEY, value) : sessionStorage.removeItem(TOKEN_KEY)),
};

export const authorization = () => (token.get() ? { Authorization: `Bearer ${token.get()}` } : {});

export class RefusedError extends Error {
  constructor(status, body) {
    super(body.message ?? `HTTP ${status}`);
    this.status = status;
    this.remedy = body.remedy ?? null;
  }
}

/** JSON of the controller; raises `RefusedError` with its message and remedy. */
export async function ask(path, { method = "GET", body } = {}) {
  const headers = { Accept: "application/json", ...authorization() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: AbortSignal.timeout(10_000), cache: "no-store" });
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new RefusedError(answer.status, told);
  return told;
}

export function notify(text, isBad = false) {
  const notice = byId("notice");
  notice.className = isBad ? "notice bad" : "notice";
  notice.replaceChildren(h("span", {}, text), h("button", { type: "button", onclick: () => notice.replaceChildren() }, "Dismiss"));
}

export class Controls {
  #waiting = null;

  /** `onToken()` is called when another token is to be used. */
  constructor({ onToken }) {
    this.onToken = onToken;
    for (const [action, order] of Object.entries(ORDERS)) byId(order.button).addEventListener("click", () => this.#ask(action));
    byId("confirm-no").addEventListener("click", () => byId("confirm").close());
    byId("confirm-yes").addEventListener("click", () => this.#confirmed());
    byId("token-open").addEventListener("click", () => this.askToken());
    byId("token-cancel").addEventListener("click", () => byId("token-dialog").close());
    byId("token-forget").addEventListener("click", () => this.#use(""));
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault(); // the form's own closing would come late, and close a dialog that asks again
      this.#use(byId("token").value.trim());
    });
  }

  /** What may be ordered now. */
  update({ isLive, isPaused }) {
    byId("pause").disabled = !isLive || isPaused;
    byId("resume").disabled = !isLive || !isPaused;
    byId("sync-now").disabled = !isLive;
  }

  askToken(text = "The controller asks for its token. It stays in this tab and is gone when the tab closes.") {
    setText(byId("token-text"), text);
    byId("token").value = "";
    if (!byId("token-dialog").open) byId("token-dialog").showModal();
    byId("token").focus();
  }

  #use(value) {
    token.set(value);
    byId("token").value = "";
    byId("token-dialog").close();
    this.onToken();
  }

  #ask(action) {
    const order = ORDERS[action];
    this.#waiting = action;
    setText(byId("confirm-title"), order.title);
    setText(byId("confirm-text"), order.text);
    setText(byId("confirm-yes"), order.yes);
    byId("confirm").showModal();
  }

  async #confirmed() {
    const action = this.#waiting;
    byId("confirm").close();
    try {
      const reply = await ask("/v1/control", { method: "POST", body: { action } });
      notify(`Done: ${reply.effect}.`);
    } catch (error) {
      if (error.status === 401) this.askToken("This order needs the controller's token. Give it, and order again.");
      notify(`Refused: ${error.message}.${error.remedy ? ` Remedy: ${error.remedy}.` : ""}`, true);
    }
  }
}
