
// -------------------------------------------------------------------------------------------------------------- talk

// {role: "user" or "tool", content, files, tool_call_id} · {role: "assistant", content, reasoning, calls, trace, asked, told, failed}
let turns = talk.turns;
let talking = null;                                      // the AbortController of the request

function sent(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.tool_call_id, content: turn.content };
  if (turn.role === "user") return { role: "user", content: withFiles(turn) };
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
  if (chunk.usage) turn.used = chunk.usage.total_tokens;
}

// How the answer came, in numbers.
function figures(turn, times) {
  const tokens = turn.trace.reduce((all, step) => all + step.tokens.length, 0), steps = turn.trace.length;
  if (!tokens) return "";
  const seconds = (times.last - times.first) / 1000, parts = [`${whole(tokens)} tokens`];
  if (seconds > 0 && steps > 1) parts.push(`${whole((tokens - turn.trace[0].tokens.length) / seconds)} tokens/s`);
  return [...parts, `${(tokens / steps).toFixed(2)} tokens per step`, `first token after ${whole(times.first - times.began)} ms`].join(" · ");
}

const FRAME_MS = 60, SAVE_MS = 3000;                     // a growing answer is drawn so often, and kept so often
const ENDS = { length: "the limit of max tokens was reached · ", stopped: "stopped · ", abort: "aborted by the server · " };

async function answerTo(asked) {
  const home = talk, turn = { role: "assistant", model: served?.model, content: "", reasoning: "", calls: [], trace: [], asked: { ...asked, system: $("system").value.trim() }, told: "", failed: "", finish: null };
  turns.push(turn);
  talking = new AbortController();
  busy(true);
  draw();
  toEnd();
  keep(home);
  const times = { began: performance.now(), first: null, last: null }, request = requestOf(turn);
  let drawing = null, saved = performance.now();
  try {
    const answer = await ask("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request), signal: talking.signal });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const chunk of events(answer)) {
      receive(turn, chunk);
      if (turn.trace.length) { times.first ??= performance.now(); if (chunk.choices.length) times.last = performance.now(); }
      drawing ??= setTimeout(() => { drawing = null; if (home === talk) redraw(turn); }, FRAME_MS);
      if (performance.now() - saved > SAVE_MS) { saved = performance.now(); keep(home); }
    }
  } catch (error) {
    if (error.name === "AbortError") turn.finish = "stopped";
    else turn.failed = error instanceof TypeError ? "The server does not answer." : error.message;
  }
  clearTimeout(drawing);
  turn.told = (ENDS[turn.finish] || "") + figures(turn, times);
  talking = null;
  busy(false);
  keep(home);
  if (home !== talk) return;
  const pinned = isAtEnd();
  draw();
  if (pinned) toEnd();
  if (turn.used) say("context-note", `${whole(turn.used)} of ${whole(served.context_length)} tokens of context`);
  say("talk-said", turn.failed || `The answer is complete: ${turn.told}`);
}

function busy(is) {
  $("turns").setAttribute("aria-busy", is);
  $("talk-send").disabled = is;
  $("talk-stop").hidden = !is;
}

function speak(turn) {
  const asked = talking ? null : options();
  if (!asked) return false;
  if (turn) turns.push(turn);
  answerTo(asked);
  return true;
}

// The field grows with its text, up to a third of the window.
function fit() {
  const field = $("message"), most = Math.max(80, window.innerHeight / 3);
  field.setAttribute("rows", Math.min(field.value.split("\n").length, 12));
  for (let rows = Number(field.getAttribute("rows")); rows < 12 && field.scrollHeight > field.clientHeight + 2 && field.clientHeight < most; rows += 1) field.setAttribute("rows", rows + 1);
}

$("talk-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!speak({ role: "user", content: $("message").value, ...(files.length ? { files } : {}) })) return;
  $("message").value = "";
  files = [];
  drawFiles();
  say("files-note", "");
  fit();
  $("message").focus();  // the button that was pressed is disabled now
});
$("message").addEventListener("input", fit);
$("message").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !$("message").value && !talking) {
    const last = turns.findLastIndex((turn) => turn.role === "user");
    if (last >= 0) { event.preventDefault(); [...$("turns").children[last].querySelectorAll("button")].find((each) => each.textContent === "Edit").click(); }
    return;
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("talk-form").requestSubmit();
});
$("talk-stop").addEventListener("click", () => { talking?.abort(); $("message").focus(); });
$("talk-copy").addEventListener("click", () => copy(asText(), $("talk-copy")));
$("show-tokens").addEventListener("change", () => { for (const turn of turns) turn.flipped = false; keepSettings(); draw(); });

// Something to begin with.
const EXAMPLES = [
  ["Explain a hash table", "with an example and its costs"], ["Write a Python function", "that counts the words of a text file"],
  ["Plan a weekend in Lisbon", "for two people who like to walk"], ["Compare tea and coffee", "in a table with four rows"],
];
$("examples").append(...EXAMPLES.map(([what, how]) => {
  const item = make("li"), button = make("button");
  button.type = "button";
  button.append(make("b", what), " ", make("span", how));
  button.addEventListener("click", () => { if (speak({ role: "user", content: `${what} ${how}.` })) $("message").focus(); });
  item.append(button);
  return item;
}));
$("talk-send").prepend(icon("send"));

// The tab's conversation, after it is loaded again.
draw();
loadConversations().then(() => {
  let id = null;
  try { id = sessionStorage.getItem(CURRENT); } catch { /* none */ }
  const found = conversations.find((one) => one.id === id);
  if (found && !turns.length) begin(structuredClone(found));
});
