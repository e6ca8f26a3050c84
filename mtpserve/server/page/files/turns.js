
// ------------------------------------------------------------------------------------------------- how turns are shown

function act(name, does) {
  const button = make("button", name, "small");
  button.type = "button";
  button.addEventListener("click", () => does(button));
  return button;
}
const callOf = (turn) => ({ user: "You", assistant: turn.model || served?.model || "Model", tool: "Result" })[turn.role];

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

const inTokens = (turn) => $("show-tokens").checked !== (turn.flipped || false) && turn.trace?.length > 0;
const PROSES = new WeakMap();                            // turn → the box of its text, which is drawn once
function proseOf(turn, grows) {
  let box = PROSES.get(turn);
  if (!box) PROSES.set(turn, box = make("div", undefined, "prose"));
  if (turn.content) drawMarkdown(box, turn.content, grows);
  else box.replaceChildren();
  return box;
}

const THOUGHTS = new WeakMap();                          // turn → the folded box of its reasoning
function thoughtOf(turn, grows) {
  let thought = THOUGHTS.get(turn);
  if (!thought) {
    THOUGHTS.set(turn, thought = make("details", undefined, "thought"));
    thought.append(make("summary"), make("div", undefined, "prose"));
  }
  thought.firstChild.textContent = grows && !turn.content ? "Thinking …" : "Reasoning";
  drawMarkdown(thought.lastChild, turn.reasoning, grows);
  return thought;
}

function answerParts(turn, grows) {
  if (inTokens(turn)) {
    const box = make("div", undefined, "tokens"), tally = new Map();
    turn.trace.forEach((step, i) => box.append(...painted(step, i + 1, tally)));
    return [box];
  }
  const waits = grows && !turn.content && !turn.reasoning && !turn.calls.length, parts = turn.reasoning ? [thoughtOf(turn, grows)] : [];
  if (waits) { const dots = make("p", undefined, "waits"); dots.append(make("i"), make("i"), make("i")); dots.setAttribute("aria-label", "The model is computing"); return [dots]; }
  return [...parts, proseOf(turn, grows), ...turn.calls.filter(Boolean).map((call) => shownCall(turn, call))];
}

function editor(turn, body, acts) {
  const form = make("form"), field = make("textarea"), row = make("div", undefined, "row"), send = make("button", "Send again", "main");
  field.value = turn.content;
  field.rows = Math.min(12, turn.content.split("\n").length + 1);
  field.required = !turn.files?.length;
  field.setAttribute("aria-label", "Message, edited");
  const close = () => { draw(); $("turns").children[turns.indexOf(turn)]?.querySelector(".acts button")?.focus(); };
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
  body.replaceChildren(form);
  acts.remove();
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
  const item = make("li", undefined, "turn " + turn.role), body = make("div", undefined, "body"), acts = make("div", undefined, "acts");
  item.append(make("h2", callOf(turn)), body);
  if (turn.role !== "assistant") {
    if (turn.files?.length) { const list = make("ul", undefined, "files"); list.append(...turn.files.map(shownFile)); body.append(list); }
    if (turn.content) body.append(make("div", turn.content, "prose"));
    if (turn.role === "user") acts.append(act("Edit", () => { if (!talking) editor(turn, body, acts); }));
    acts.append(copyButton(() => withFiles(turn)));
    item.append(acts);
    return item;
  }
  const grows = talking !== null && turn === turns.at(-1);
  body.append(...answerParts(turn, grows));
  if (grows) return item;
  if (turn.failed) { const why = make("p", turn.failed, "told bad"); why.setAttribute("role", "alert"); body.append(why); }
  if (turn.told) body.append(make("p", turn.told, "told note"));
  acts.append(act("Retry", () => retry(turn)), copyButton(() => turn.content), act("Export", () => exported(requestOf(turn))));
  if (turn.trace?.length) {
    const tokens = act("Tokens", () => {
      turn.flipped = !turn.flipped;
      draw();
      [...$("turns").children[turns.indexOf(turn)].querySelectorAll("button")].find((each) => each.textContent === "Tokens").focus();
    });
    tokens.setAttribute("aria-pressed", inTokens(turn));
    tokens.title = "Show each token in the colour of its source";
    acts.append(tokens);
  }
  item.append(acts);
  return item;
}

function shownFile(file) {
  const item = make("li"), box = make("details"), summary = make("summary"), text = make("pre", file.text);
  summary.append(icon("file"), make("span", file.name, "file-name"), make("span", size(file.text), "note"));
  text.tabIndex = 0;
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", file.name);
  box.append(summary, text);
  item.append(box);
  return item;
}

function draw() {
  $("turns-empty").hidden = turns.length > 0;
  $("talk-copy").hidden = turns.length === 0;
  $("turns").replaceChildren(...turns.map(shownTurn));
  const tally = new Map(), coloured = turns.filter(inTokens);
  for (const turn of coloured) turn.trace.forEach((step, i) => painted(step, i + 1, tally));
  $("talk-legend").hidden = coloured.length === 0;
  legendOf($("talk-legend"), tally);
  atEnd();
}

// While an answer grows it alone is drawn anew, and followed if its end is in sight.
const NEAR = 80;                                         // pixels
const isAtEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < NEAR;
function atEnd() { $("to-end").hidden = isAtEnd(); }
function toEnd() { $("scroll").scrollTop = $("scroll").scrollHeight; atEnd(); }
function redraw(turn) {
  const pinned = isAtEnd(), body = $("turns").children[turns.indexOf(turn)].querySelector(".body"), parts = answerParts(turn, true);
  if (parts.length !== body.childNodes.length || parts.some((part, i) => part !== body.childNodes[i])) body.replaceChildren(...parts);
  if (pinned) toEnd(); else atEnd();
}

const asText = () => turns.map((turn) => {
  const calls = (turn.calls || []).map((call) => `[calls ${call.name} ${call.args}]`);
  return `${callOf(turn)}:\n${[turn.role === "user" ? withFiles(turn) : turn.content, ...calls].filter(Boolean).join("\n")}`;
}).join("\n\n");

$("to-end").append(icon("down"));
$("to-end").addEventListener("click", () => { toEnd(); $("message").focus(); });
$("scroll").addEventListener("scroll", atEnd, { passive: true });
