// The API as its OpenAPI description tells it: operations by tag, their fields, and a form to try each.

const TOKEN_KEY = "wadiloco-token";
const METHODS = ["get", "post", "put", "patch", "delete", "head"];
const DEEPEST = 12;

function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

let spec = null;

const resolve = (schema) => {
  if (!schema?.$ref) return schema ?? {};
  return schema.$ref.split("/").slice(1).reduce((at, part) => at?.[part.replaceAll("~1", "/").replaceAll("~0", "~")], spec) ?? {};
};

const nameOf = (schema) => schema?.$ref?.split("/").at(-1);

/** Prose with ``names`` in it. */
const prose = (text) => text.split(/``?([^`]+)``?/).map((part, at) => (at % 2 ? h("code", {}, part) : part));

/** The type in a few words, with the names of models. */
function typeOf(schema) {
  if (!schema) return "anything";
  if (schema.$ref) return nameOf(schema);
  const options = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (options) return options.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? schema.prefixItems?.[0])}`;
  if (schema.type === "object" && schema.additionalProperties) return `map to ${typeOf(schema.additionalProperties === true ? null : schema.additionalProperties)}`;
  return schema.type ?? "anything";
}

const BOUNDS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", minLength: "length ≥", maxLength: "length ≤", maxItems: "items ≤", pattern: "matches" };

const boundsOf = (schema) => Object.entries(BOUNDS).filter(([key]) => key in (schema ?? {})).map(([key, sign]) => `${sign} ${schema[key]}`);

/** The model that a type leads to, through lists, maps and alternatives. */
function modelOf(schema, depth = 0) {
  if (!schema || depth > DEEPEST) return null;
  if (schema.$ref) return schema;
  const parts = [...(schema.anyOf ?? schema.oneOf ?? schema.allOf ?? []), schema.items, ...(schema.prefixItems ?? []), schema.additionalProperties];
  return parts.filter((part) => part && typeof part === "object").map((part) => modelOf(part, depth + 1)).find(Boolean) ?? null;
}

/** The fields of a model; those of the models within it are made when they are opened. */
function fieldsOf(schema) {
  const model = resolve(schema);
  if (model.enum) return h("p", { class: "soft" }, model.enum.map((value) => JSON.stringify(value)).join(" | "));
  const required = new Set(model.required ?? []);
  const items = Object.entries(model.properties ?? {}).map(([name, field]) => {
    const facts = [typeOf(field), ...boundsOf(field), required.has(name) ? "required" : "default" in field ? `default ${JSON.stringify(field.default)}` : null];
    return h("li", {}, h("code", {}, name), h("span", { class: "soft" }, ` ${facts.filter(Boolean).join(", ")}`), field.description ? h("div", {}, prose(field.description)) : null, within(field));
  });
  return h("div", {}, model.description ? h("p", {}, prose(model.description)) : null, h("ul", {}, items));
}

function within(schema) {
  const model = modelOf(schema);
  if (!model) return null;
  const details = h("details", {}, h("summary", {}, nameOf(model)));
  details.addEventListener("toggle", () => details.childElementCount === 1 && details.append(fieldsOf(model)), { once: true });
  return details;
}

function exampleOf(content) {
  const told = Object.values(content.examples ?? {})[0];
  if (told) return resolve(told).value;
  return content.example ?? sketch(content.schema);
}

/** A body with the required fields, to begin with. */
function sketch(schema, depth = 0) {
  const model = resolve(schema);
  if (depth > DEEPEST) return null;
  if (model.examples?.length) return model.examples[0];
  if ("default" in model) return model.default;
  if (model.enum) return model.enum[0];
  if (model.anyOf) return sketch(model.anyOf[0], depth + 1);
  if (model.type === "object") return Object.fromEntries((model.required ?? []).map((name) => [name, sketch(model.properties?.[name], depth + 1)]));
  return { array: [], string: "", integer: 0, number: 0, boolean: false }[model.type] ?? null;
}

function operation(path, method, told) {
  const body = told.requestBody?.content?.["application/json"];
  const head = h("summary", {}, h("span", { class: "method" }, method.toUpperCase()), h("span", { class: "path" }, path), h("span", { class: "soft" }, ` ${told.summary ?? ""}`));
  const details = h("details", { class: "operation" }, head);
  details.addEventListener(
    "toggle",
    () => {
      details.append(
        ...[
          told.description ? h("p", {}, prose(told.description)) : null,
          (told.parameters ?? []).length ? [h("h3", {}, "Parameters"), h("ul", {}, told.parameters.map(parameter))] : null,
          body ? [h("h3", {}, `Body: ${typeOf(body.schema)}`), modelOf(body.schema) ? fieldsOf(modelOf(body.schema)) : null] : null,
          h("h3", {}, "Answers"),
          h("ul", {}, Object.entries(told.responses ?? {}).map(([status, answer]) => answerOf(status, answer))),
          tryOut(path, method, told, body),
        ].flat().filter(Boolean),
      );
    },
    { once: true },
  );
  return details;
}

const parameter = (told) =>
  h("li", {}, h("code", {}, told.name), h("span", { class: "soft" }, ` in ${told.in}, ${typeOf(told.schema)}${told.required ? ", required" : ""} ${boundsOf(told.schema).join(", ")}`), told.description ? h("div", {}, prose(told.description)) : null);

function answerOf(status, answer) {
  const [type, content] = Object.entries(answer.content ?? {})[0] ?? [];
  const what = content?.schema && Object.keys(content.schema).length ? typeOf(content.schema) : (type ?? "nothing");
  return h("li", {}, h("code", {}, status), ` ${answer.description ?? ""}: ${what}`, content?.schema ? within(content.schema) : null);
}

function tryOut(path, method, told, body) {
  const inputs = (told.parameters ?? []).map((at) => ({ at, input: h("input", { type: "text", autocomplete: "off" }) }));
  const text = body ? h("textarea", { spellcheck: "false" }, JSON.stringify(exampleOf(body), null, 2)) : null;
  const output = h("pre", { tabindex: "0", "aria-live": "polite", hidden: "" });
  const form = h(
    "form",
    {},
    h("h3", {}, "Try it"),
    inputs.map(({ at, input }) => h("label", {}, at.name, input)),
    text ? h("label", {}, "Body", text) : null,
    h("button", { type: "submit" }, `Send ${method.toUpperCase()}`),
    output,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(path, method, inputs, text?.value, output);
  });
  return form;
}

async function send(path, method, inputs, body, output) {
  const query = new URLSearchParams();
  const headers = {};
  let url = path;
  for (const { at, input } of inputs) {
    if (input.value === "" && at.in !== "path") continue;
    if (at.in === "path") url = url.replace(new RegExp(`\\{${at.name}(:path)?\\}`), encodeURIComponent(input.value));
    else if (at.in === "header") headers[at.name] = input.value;
    else query.append(at.name, input.value);
  }
  if (sessionStorage.getItem(TOKEN_KEY)) headers.Authorization = `Bearer ${sessionStorage.getItem(TOKEN_KEY)}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  output.hidden = false;
  output.textContent = "Waiting for the answer.";
  try {
    const answer = await fetch(query.size ? `${url}?${query}` : url, { method: method.toUpperCase(), headers, body, cache: "no-store", signal: AbortSignal.timeout(35_000) });
    output.textContent = `HTTP ${answer.status}\n${pretty(await answer.text())}`;
  } catch (error) {
    output.textContent = error.name === "TimeoutError" ? "No whole answer within 35 s (a stream does not end)." : `No answer: ${error.message}`;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function draw() {
  byId("title").textContent = `${spec.info.title} ${spec.info.version}`;
  document.title = spec.info.title;
  byId("about").textContent = spec.info.description ?? "";
  const byTag = new Map();
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const method of METHODS.filter((name) => name in methods)) {
      const tag = methods[method].tags?.[0] ?? "other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), operation(path, method, methods[method])]);
    }
  }
  byId("operations").replaceChildren(...[...byTag].flatMap(([tag, operations]) => [h("h2", {}, tag), ...operations]));
}

byId("token").value = sessionStorage.getItem(TOKEN_KEY) ?? "";
byId("token").addEventListener("change", () => {
  const value = byId("token").value.trim();
  if (value) sessionStorage.setItem(TOKEN_KEY, value);
  else sessionStorage.removeItem(TOKEN_KEY);
});
try {
  const answer = await fetch("/openapi.json", { cache: "no-store" });
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  spec = await answer.json();
  draw();
} catch (error) {
  byId("operations").replaceChildren(h("p", {}, `openapi.json cannot be read: ${error.message}`));
}
