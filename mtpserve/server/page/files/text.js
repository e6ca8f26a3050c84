
// --------------------------------------------------------------------------------- text to continue, token by token

let running = null;                                      // the AbortController of the request
const tally = new Map();                                 // class → number of tokens

function legend() { legendOf($("legend"), tally); }

// What is in the fields at first: a question for a model that converses, Python for the demo, which knows nothing else, prose for other models.
const QUESTION = "Explain in three sentences what speculative decoding is.", PROSE = "The printing press changed Europe in the fifteenth century, because";
const PYTHON = "import os\n\ndef read_lines(path):", FIELDS = { "prompt": "kind", "race-prompt": "race-kind", "trees-prompt": "trees-kind" };
function prefill(state) {
  const chats = state.chat && state.model !== "demo", first = chats ? QUESTION : state.model === "demo" ? PYTHON : PROSE;
  for (const [field, kind] of Object.entries(FIELDS)) {
    $(kind).querySelector("[value=chat]").disabled = !state.chat;
    if ($(field).value !== "") continue;  // a browser keeps what somebody typed over a reload
    $(field).value = first;
    $(kind).value = chats ? "chat" : "completions";
  }
}

// Whether the legend names a source's drafts before there are any: those of the drafter that this server has.
function expected(source, depth) {
  const first = served?.speculative_algorithm === "NGRAM" ? "ngram" : "mtp";
  return source === first && depth <= Math.min(3, served?.speculative_steps || 0);
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
  output.replaceChildren(); $("misses").tBodies[0].replaceChildren(); output.setAttribute("aria-busy", "true"); tally.clear(); legend(); result("waiting for the first token");
  try {
    const answer = await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal: running.signal });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const chunk of events(answer)) for (const choice of chunk.choices) {
      const pinned = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
      for (const step of choice.spec_trace || []) {
        first ??= (performance.now() - began) / 1000;
        steps += 1; tokens += step.tokens.length;
        output.append(...painted(step, steps, tally));
        $("misses").tBodies[0].append(...misses(step, steps));
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

$("show-rejected").addEventListener("change", () => { $("rejected").hidden = !$("show-rejected").checked; $("output").classList.toggle("marked", $("show-rejected").checked); });
$("form").addEventListener("submit", (event) => { event.preventDefault(); if (!running) generate(); });
$("stop").addEventListener("click", () => running && running.abort());
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
legend();
