// A request that a person can change and send, and the same as a command for curl.
const schemaOf = (told) => told.requestBody?.content[JSON_TYPE]?.schema, MOST_SHOWN = 200000;
let trials = 0;  // numbers their fields

// {address, options, parts}: the request as the fields say. Of the parameters those are sent that are filled in.
function requestOf(method, path, told, values, body) {
  const query = new URLSearchParams(), headers = body === null ? {} : { "Content-Type": JSON_TYPE };
  let address = path;
  for (const each of told.parameters || []) {
    const value = values.get(each.name);
    if (each.in === "path") address = address.replace(`{${each.name}}`, value ? encodeURIComponent(value) : each.name.toUpperCase());
    else if (value && each.in === "header") headers[each.name] = value;
    else if (value) query.append(each.name, value);
  }
  return { address: address.slice(1) + (query.size ? `?${query}` : ""), options: { method: method.toUpperCase(), headers, ...(body === null ? {} : { body }) } };
}

function command({ address, options }) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`, base = new URL(".", location.href).href;
  const said = options.method === (options.body === undefined ? "GET" : "POST") ? "curl" : `curl -X ${options.method}`;
  const headers = Object.entries(options.headers).map(([name, value]) => `-H ${quoted(`${name}: ${value}`)}`);
  if (key()) headers.unshift('-H "Authorization: Bearer $MTPSERVE_API_KEY"');
  let body = options.body;
  try { body = JSON.stringify(JSON.parse(body)); } catch { /* as it is */ }
  return [`${said} ${quoted(base + address)}`, ...headers, ...(body === undefined ? [] : [`-d ${quoted(body)}`])].join(" \\\n  ");
}

// The text that an event of a stream adds, in the APIs' forms; SGLang's events have all of it.
function added(event, before) {
  if (typeof event.text === "string" && event.meta_info) return event.text.slice(before.length);
  if (event.type === "response.output_text.delta") return event.delta;
  if (event.type === "content_block_delta") return event.delta.text || "";
  return (event.choices || []).map((choice) => choice.delta?.content ?? choice.text ?? "").join("");
}

// Reads an answer and tells of it as it grows: all of what came, and of a stream the text in it.
async function read(answer, heard) {
  const streamed = (answer.headers.get("Content-Type") || "").startsWith("text/event-stream");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let all = "", rest = "", text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    all += value;
    if (streamed) {
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: {")) text += added(JSON.parse(line.slice(6)), text);
    }
    heard(all, text);
  }
  return all;
}

const inSeconds = (ms) => `${(ms / 1000).toFixed(ms < 100 ? 3 : 2)} s`;
const cut = (text) => text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}\n… and ${text.length - MOST_SHOWN} characters more` : text;
function pretty(text) { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } }

function field(title, made, inside) {
  const label = make("label", title), box = make("div");
  made.id = `trial-${trials += 1}`;
  label.htmlFor = made.id;
  box.append(label, made);
  inside.append(box);
  return made;
}

// A check box that puts `stream` into the body, or takes it out, while the body is JSON.
function streaming(body, changed) {
  const label = make("label", undefined, "check"), box = Object.assign(make("input"), { type: "checkbox" });
  const parsed = () => { try { return JSON.parse(body.value); } catch { return null; } };
  const shown = () => { const now = parsed(); box.disabled = now === null; box.checked = now?.stream === true; };
  box.addEventListener("change", () => {
    const { stream, ...rest } = parsed();
    body.value = JSON.stringify(box.checked ? { ...rest, stream: true } : rest, null, 2);
    changed();
  });
  label.append(box, " Stream the answer");
  return [label, shown];
}

// The form of a route: parameters, body, Send, what came of it, and the command.
function trial(method, path, told) {
  const form = make("form", undefined, "trial"), code = make("pre"), schema = schemaOf(told), example = schema && exampleOf(schema), values = new Map();
  const names = make("div", undefined, "names");
  for (const each of told.parameters || []) {
    const input = field(`${each.name}, in the ${each.in}`, make("input", undefined, "code"), names);
    input.required = each.required;
    input.placeholder = each.schema.default ?? "";
    input.addEventListener("input", () => { values.set(each.name, input.value); changed(); });
  }
  if (names.children.length) form.append(names);
  const body = schema ? field("Body, JSON", make("textarea"), form) : null, first = example === undefined ? "" : JSON.stringify(example, null, 2);
  const row = make("div", undefined, "row"), send = make("button", "Send", "main"), stop = make("button", "Stop"), said = make("p", "", "said"), output = make("div", undefined, "came");
  const request = () => requestOf(method, path, told, values, body && body.value.trim() ? body.value : null);
  let showStream = () => {};
  function changed() { showStream(); code.textContent = command(request()); }
  stop.type = "button";
  stop.disabled = true;
  send.setAttribute("aria-label", `Send ${method.toUpperCase()} ${path}`);
  said.setAttribute("role", "status");
  row.append(send, stop);
  if (body) {
    body.value = first;
    body.spellcheck = false;
    body.rows = Math.min(16, Math.max(3, first.split("\n").length + 1));
    body.addEventListener("input", changed);
    const reset = Object.assign(make("button", "Example again"), { type: "button" });
    reset.addEventListener("click", () => { body.value = first; changed(); });
    if (objects(schema).some(([, each]) => "stream" in each.properties)) {
      const [label, shown] = streaming(body, changed);
      showStream = shown;
      row.append(label);
    }
    row.append(reset);
  }
  form.append(row, said, output);
  form.addEventListener("submit", (event) => { event.preventDefault(); if (!send.disabled) sent(request(), { send, stop, said, output }); });
  changed();
  return [make("h3", "Try it"), form, ...curl(method, path, code)];
}

async function sent({ address, options }, { send, stop, said, output }) {
  const running = new AbortController(), began = performance.now(), text = make("pre", "", "text"), raw = make("pre");
  const since = () => inSeconds(performance.now() - began), end = () => running.abort();
  let status = "", first = "";
  const say = (words, bad) => { said.className = bad ? "said bad" : "said"; said.textContent = words; };
  send.disabled = true;
  stop.disabled = false;
  stop.addEventListener("click", end);
  output.replaceChildren();
  say("sent, waiting for the answer");
  try {
    const answer = await ask(address || ".", { ...options, signal: running.signal });
    status = `${answer.status} ${answer.statusText}`.trim();
    const all = await read(answer, (all, written) => {
      first ||= since();
      if (written) text.textContent = written;
      raw.textContent = cut(all);
      if (!output.children.length) output.append(raw);
      if (written && !text.isConnected) output.prepend(text);
      say(`${status} · ${since()} so far`, !answer.ok);
    });
    raw.textContent = cut(pretty(all));
    const kinds = [answer.headers.get("Content-Type"), `${new Blob([all]).size.toLocaleString("en-US")} bytes`, text.isConnected ? `first after ${first}` : ""];
    say([status, since(), ...kinds].filter(Boolean).join(" · ") + (answer.status === 401 ? " · Type the key at the top of the page, then send again." : ""), !answer.ok);
  } catch (error) {
    if (error.name === "AbortError") say([status, `stopped after ${since()}`].filter(Boolean).join(" · "));
    else say(error instanceof TypeError ? "The server does not answer." : error.message, true);
  } finally {
    send.disabled = false;
    stop.disabled = true;
    stop.removeEventListener("click", end);
  }
}

function curl(method, path, code) {
  const title = make("div", undefined, "copied"), button = make("button", "Copy");
  button.setAttribute("aria-label", `Copy the curl command of ${method.toUpperCase()} ${path}`);
  button.addEventListener("click", () => copy(code.textContent, button));
  title.append(make("h3", "With curl"), button);
  return [title, code];
}
