
// -------------------------------------------------------------------------------------------------------------- talk

// {role: "user" or "tool", content, tool_call_id} · {role: "assistant", content, reasoning, calls, trace, asked, told, failed}
let turns = [];
let talking = null;                                      // the AbortController of the request
const KEPT = "mtpserve-talk", OPTIONS = { temperature: "talk-temperature", top_p: "talk-top-p", seed: "talk-seed", max_tokens: "talk-max-tokens" };

function keep() {
  const lasting = turns.map(({ trace, ...turn }) => turn);
  try { sessionStorage.setItem(KEPT, JSON.stringify({ turns: lasting, system: $("system").value })); } catch { /* it is full */ }
}

// What is sent beside the messages; null: a field is wrong, and says so.
function options() {
  const asked = { model: served?.model || "", stream: true, stream_options: { include_usage: true }, return_spec_trace: true };
  for (const [name, id] of Object.entries(OPTIONS)) {
    if (!$(id).reportValidity()) return null;
    if ($(id).value !== "") asked[name] = Number($(id).value);
  }
  say("tools-note", "");
  if ($("tools").value.trim()) {
    try {
      asked.tools = JSON.parse($("tools").value);
      if (!Array.isArray(asked.tools)) throw new Error("it is no list");
    } catch (error) {
      $("talk-options").open = true;
      say("tools-note", `Tools: ${error.message}`);
      $("tools").focus();
      return null;
    }
    asked.tool_choice = $("tool-choice").value;
  }
  return asked;
}

function sent(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.tool_call_id, content: turn.content };
  if (turn.role === "user") return { role: "user", content: turn.content };
  const calls = turn.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  return { role: "assistant", content: turn.content, ...(calls.length ? { tool_calls: calls } : {}) };
}

// The request that a turn was, or is to be, the answer to.
function requestOf(turn) {
  const before = turns.slice(0, turns.indexOf(turn)).map(sent), { system, ...rest } = turn.asked;
  return { ...rest, messages: [...(system ? [{ role: "system", content: system }] : []), ...before] };
}

function receive(turn, chunk) {
  for (const choice of chunk.choices) {
    const delta = choice.delta || {};
    turn.reasoning += delta.reasoning_content || delta.reasoning || "";
    turn.content += delta.content || "";
    for (const part of delta.tool_calls || []) {
      const call = turn.calls[part.index] ??= { id: part.id, name: "", args: "" };
      call.name += part.function.name || "";
      call.args += part.function.arguments || "";
    }
    turn.trace.push(...(choice.spec_trace || []));
    turn.finish = choice.finish_reason || turn.finish;
  }
}

// How the answer came, in numbers.
function figures(turn, times) {
  const tokens = turn.trace.reduce((all, step) => all + step.tokens.length, 0), steps = turn.trace.length;
  if (!tokens) return "";
  const seconds = (times.last - times.first) / 1000, rate = seconds > 0 && steps > 1 ? ` · ${whole((tokens - turn.trace[0].tokens.length) / seconds)} tokens/s` : "";
  return `${whole(tokens)} tokens · ${(tokens / steps).toFixed(2)} per step${rate} · first after ${whole(times.first - times.began)} ms`;
}

async function answerTo(asked) {
  const turn = { role: "assistant", content: "", reasoning: "", calls: [], trace: [], asked: { ...asked, system: $("system").value.trim() }, told: "", failed: "", finish: null };
  turns.push(turn);
  draw();
  $("turns").lastElementChild.scrollIntoView({ block: "nearest" });
  talking = new AbortController();
  busy(true);
  const times = { began: performance.now(), first: null, last: null };
  let drawing = null;
  try {
    const answer = await ask("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(requestOf(turn)), signal: talking.signal });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const chunk of events(answer)) {
      receive(turn, chunk);
      if (turn.trace.length) { times.first ??= performance.now(); if (chunk.choices.length) times.last = performance.now(); }
      drawing ??= requestAnimationFrame(() => { drawing = null; if (turns.includes(turn)) redraw(turn); });
    }
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "stopped";
    else turn.failed = error instanceof TypeError ? "The server does not answer." : error.message;
  }
  cancelAnimationFrame(drawing);
  const ends = { length: "the limit was reached · ", stopped: "stopped · ", abort: "aborted by the server · " };
  turn.told = (ends[turn.finish] || "") + figures(turn, times);
  talking = null;
  busy(false);
  draw();
  say("talk-said", turn.failed || `The answer is complete: ${turn.told}`);
  keep();
}

function busy(is) {
  $("turns").setAttribute("aria-busy", is);
  $("talk-send").disabled = is;
  $("talk-stop").disabled = !is;
}

function speak(turn) {
  const asked = talking ? null : options();
  if (!asked) return false;
  if (turn) turns.push(turn);
  answerTo(asked);
  return true;
}

// ------------------------------------------------------------------------------------------------- how turns are shown

function act(name, does) {
  const button = make("button", name, "small");
  button.type = "button";
  button.addEventListener("click", () => does(button));
  return button;
}

function shownCall(turn, call) {
  const box = make("section", undefined, "call"), head = make("h3", "Calls "), done = turns.some((each) => each.role === "tool" && each.tool_call_id === call.id);
  let args = call.args;
  try { args = JSON.stringify(JSON.parse(args), null, 2); } catch { /* it is not complete */ }
  head.append(make("code", call.name));
  box.setAttribute("aria-label", `Call of ${call.name}`);
  box.append(head, make("pre", args));
  if (!done && turn.finish && turn === turns.findLast((each) => each.role === "assistant")) {
    const form = make("form"), field = make("textarea"), label = make("label", `Result of ${call.name}`), send = make("button", "Send result");
    field.rows = 2;
    field.required = true;
    label.append(field);
    form.append(label, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (talking) return;
      const all = turn.calls.every((each) => each === call || turns.some((other) => other.tool_call_id === each.id));
      const result = { role: "tool", content: field.value, tool_call_id: call.id };
      if (all) speak(result); else { turns.push(result); draw(); }
    });
    box.append(form);
  }
  return box;
}

function answerParts(turn) {
  const parts = [], running = talking && turn === turns.at(-1);
  if ($("show-tokens").checked !== (turn.flipped || false) && turn.trace?.length) {
    const box = make("div", undefined, "tokens"), tally = new Map();
    turn.trace.forEach((step, i) => box.append(...painted(step, i + 1, tally)));
    return [box];
  }
  if (turn.reasoning) {
    const thought = make("details", undefined, "thought"), text = make("div", undefined, "prose");
    text.append(...markdown(turn.reasoning));
    thought.append(make("summary", running && !turn.content ? "Thinking …" : "Reasoning"), text);
    thought.open = turn.opened || false;
    thought.addEventListener("toggle", () => { turn.opened = thought.open; });
    parts.push(thought);
  }
  const prose = make("div", undefined, "prose");
  prose.append(...(turn.content ? markdown(turn.content) : running && !turn.reasoning && !turn.calls.length ? [make("p", "…", "note")] : []));
  return [...parts, prose, ...turn.calls.filter(Boolean).map((call) => shownCall(turn, call))];
}

function editor(turn, item) {
  const form = make("form"), field = make("textarea"), row = make("div", undefined, "row"), send = make("button", "Send again", "main");
  field.value = turn.content;
  field.rows = Math.min(12, turn.content.split("\n").length + 1);
  field.required = true;
  field.setAttribute("aria-label", "Message, edited");
  const close = () => { draw(); $("turns").children[turns.indexOf(turn)]?.querySelector("button")?.focus(); };
  field.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); close(); } });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const asked = talking ? null : options();
    if (!asked) return;
    turn.content = field.value;
    turns.length = turns.indexOf(turn) + 1;
    answerTo(asked);
    $("message").focus();
  });
  row.append(send, act("Cancel", close));
  form.append(field, row);
  item.replaceChildren(form);
  field.focus();
}

function retry(turn) {
  const asked = talking ? null : options();
  if (!asked) return;
  turns.length = turns.indexOf(turn);
  answerTo(asked);
  $("message").focus();
}

function shownTurn(turn) {
  const item = make("li", undefined, "turn " + turn.role), name = { user: "You", assistant: served?.model || "Model", tool: "Result" }[turn.role];
  item.append(make("h2", name));
  if (turn.role !== "assistant") {
    const acts = make("div", undefined, "acts");
    if (turn.role === "user") acts.append(act("Edit", () => { if (!talking) editor(turn, item); }));
    acts.append(copyButton(() => turn.content));
    item.append(make("div", turn.content, "prose"), acts);
    return item;
  }
  item.append(...answerParts(turn));
  if (talking && turn === turns.at(-1)) return item;
  const acts = make("div", undefined, "acts");
  if (turn.failed) { const why = make("p", turn.failed, "told bad"); why.setAttribute("role", "alert"); item.append(why); }
  if (turn.told) item.append(make("p", turn.told, "told note"));
  acts.append(act("Retry", () => retry(turn)), copyButton(() => turn.content), act("Export", () => exported(requestOf(turn))));
  if (turn.trace?.length) {
    const tokens = act("Tokens", () => {
      turn.flipped = !turn.flipped;
      draw();
      [...$("turns").children[turns.indexOf(turn)].querySelectorAll("button")].find((each) => each.textContent === "Tokens").focus();
    });
    tokens.setAttribute("aria-pressed", $("show-tokens").checked !== (turn.flipped || false));
    acts.append(tokens);
  }
  item.append(acts);
  return item;
}

function draw() {
  $("turns-empty").hidden = turns.length > 0;
  $("turns").replaceChildren(...turns.map(shownTurn));
  const tally = new Map(), coloured = turns.filter((turn) => turn.trace?.length && $("show-tokens").checked !== (turn.flipped || false));
  for (const turn of coloured) turn.trace.forEach((step, i) => painted(step, i + 1, tally));
  $("talk-legend").hidden = coloured.length === 0;
  legendOf($("talk-legend"), tally);
}

// While an answer grows it alone is drawn anew, and followed if its end is in sight.
function redraw(turn) {
  const pinned = document.documentElement.scrollHeight - window.scrollY - window.innerHeight < 120;
  $("turns").children[turns.indexOf(turn)].replaceWith(shownTurn(turn));
  if (pinned) window.scrollTo(0, document.documentElement.scrollHeight);
}

const asText = () => turns.map((turn) => {
  const calls = (turn.calls || []).map((call) => `[calls ${call.name} ${call.args}]`);
  return `${{ user: "You", assistant: served?.model || "Model", tool: "Result" }[turn.role]}:\n${[turn.content, ...calls].filter(Boolean).join("\n")}`;
}).join("\n\n");

$("talk-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!speak({ role: "user", content: $("message").value })) return;
  $("message").value = "";
  $("message").focus();  // the button that was pressed is disabled now
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("talk-form").requestSubmit();
});
$("talk-stop").addEventListener("click", () => { talking?.abort(); $("message").focus(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") talking?.abort(); });
$("talk-new").addEventListener("click", () => { talking?.abort(); turns = []; draw(); keep(); $("message").focus(); });
$("talk-copy").addEventListener("click", () => copy(asText(), $("talk-copy")));
$("show-tokens").addEventListener("change", () => { for (const turn of turns) turn.flipped = false; draw(); });
$("system").addEventListener("change", keep);

window.matchMedia("(max-width: 860px)").matches && ($("talk-options").open = false);
try { ({ turns, system: $("system").value } = JSON.parse(sessionStorage.getItem(KEPT)) || { turns, system: "" }); } catch { /* from another version */ }
draw();
