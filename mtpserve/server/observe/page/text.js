
// --------------------------------------------------------------------------------- text to continue, token by token

let running = null;                                      // the AbortController of the request
const tally = new Map();                                 // class → number of tokens

function legend() {
  const items = [["t own", "the model's own"], ...Object.entries(SOURCES).flatMap(([source, name]) =>
    [1, 2, 3, 4, 5, 6, 7].filter((depth) => tally.has(`t drafted ${source} d${depth}`) || (source === "mtp" && depth <= 3))
      .map((depth) => [`t drafted ${source} d${depth}`, `${name}, depth ${depth}${depth === 7 ? " and more" : ""}`]))];
  $("legend").replaceChildren(...items.map(([name, text]) => {
    const item = make("li");
    item.append(make("span", "token", "sample " + name), " " + text + " ", make("b", tally.has(name) ? whole(tally.get(name)) : ""));
    return item;
  }));
}

function token(text, name, title) {
  const made = make("span", undefined, name);
  // A sign that is drawn, not written, shows where a token breaks the line: what is copied is the text.
  text.split("\n").forEach((part, i) => made.append(...(i > 0 ? [make("span", "", "break"), "\n"] : []), part));
  made.title = title;
  tally.set(name, (tally.get(name) || 0) + 1);
  return made;
}

// One step: drafts that were accepted, in order, then the model's own token; and what was proposed first in the place of that one.
function painted(step, number) {
  const nodes = step.proposed.map((draft, i) => ({ ...draft, node: i + 1 })), accepted = nodes.filter((draft) => draft.accepted), made = [];
  step.tokens.forEach((id, i) => {
    const draft = accepted[i], text = step.texts[i];
    if (draft) made.push(token(text, `t drafted ${kind(draft.source)} d${Math.min(7, i + 1)}`, `step ${number}: draft, depth ${i + 1}, from ${called(draft.source)}`));
    else {
      if ($("show-rejected").checked) made.push(...rejected(nodes, accepted.length ? accepted.at(-1).node : 0));
      made.push(token(text, "t own", `step ${number}: the model's own`));
    }
  });
  return made;
}

function rejected(nodes, parent) {
  const made = [];
  for (let next; (next = nodes.find((draft) => draft.parent === parent && !draft.accepted)); parent = next.node) {
    made.push(make("del", next.text.replaceAll("\n", "\u23CE")));
    made.at(-1).title = `rejected draft from ${called(next.source)}`;
  }
  return made;
}

function body() {
  const chat = $("kind").value === "chat", prompt = $("prompt").value, asked = {
    max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value), stream: true, return_spec_trace: true,
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  if ($("prediction").value) asked.prediction = { type: "content", content: $("prediction").value };
  if ($("regex").value) asked.regex = $("regex").value;
  return [chat ? "v1/chat/completions" : "v1/completions", asked];
}

function result(text, bad) { $("result").className = bad ? "bad" : ""; say("result", text); }

async function generate() {
  const [path, asked] = body(), output = $("output"), began = performance.now();
  let steps = 0, tokens = 0, first = null, finish = null;
  const summary = (end) => {
    const seconds = (performance.now() - began) / 1000;
    return tokens === 0 ? end : `${end}: ${tokens} tokens in ${steps} steps, ${(tokens / steps).toFixed(2)} per step, first after ${(1000 * first).toFixed(0)} ms, ${(tokens / seconds).toFixed(0)} tokens/s`;
  };
  running = new AbortController();
  $("send").disabled = true; $("stop").disabled = false;
  output.replaceChildren(); output.setAttribute("aria-busy", "true"); tally.clear(); legend(); result("waiting for the first token");
  try {
    const answer = await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal: running.signal });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const chunk of events(answer)) for (const choice of chunk.choices) {
      const pinned = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
      for (const step of choice.spec_trace || []) {
        first ??= (performance.now() - began) / 1000;
        steps += 1; tokens += step.tokens.length;
        output.append(...painted(step, steps));
      }
      finish = choice.finish_reason || finish;
      if (pinned) output.scrollTop = output.scrollHeight;
      legend();
      result(summary("running"));
    }
    result(summary(finish === "length" ? "the limit was reached" : "done"));
  } catch (error) {
    if (error.name === "AbortError") result(summary("stopped"));
    else result(error instanceof TypeError ? "The server does not answer." : error.message, true);
  } finally {
    running = null;
    output.setAttribute("aria-busy", "false");
    $("send").disabled = false; $("stop").disabled = true;
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); if (!running) generate(); });
$("stop").addEventListener("click", () => running && running.abort());
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
legend();
