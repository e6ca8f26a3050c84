
// --------------------------------------------------------------------------------------- the head, and the poll

let dead = null;  // why the engine is gone, if the server still said so

function status(kind, text, trouble) {
  $("status").className = kind;
  say("status", text);
  document.body.classList.toggle("stale", kind === "dead" || kind === "unreachable");
  $("trouble").hidden = !trouble;
  say("trouble", trouble || "");
}

// Who drafts, how far (n-grams beside a draft model have a length of their own), and how often: n-grams are often not found.
// Each step of a request writes its accepted drafts and one token.
function drafting({ speculative_algorithm: algorithm, speculative_steps: most, stats }) {
  if (!most || !algorithm) return "no drafts: plain decoding";
  const names = algorithm.split("+"), free = stats.draft_tokens_per_position.length, steps = stats.generation_tokens_total - stats.accepted_tokens_total;
  const first = `drafts up to ${plural(most, "token")} ahead (${names[0] === "NGRAM" ? "n-grams" : drafter(stats)})`;
  return first + (names.length > 1 ? ` and ${free} (n-grams)` : "") + (steps > 0 ? `, in ${percent(stats.drafts_total, steps)} of the steps` : "");
}

function told(state) {
  const first = served === null;
  served = state;
  if (first) { suit(state); draw(); prefill(state); legend(); }  // what depends on the model
  document.title = `${state.model} – mtpserve`;
  say("model", state.model);
  $("facts").title = `${state.version} · context ${whole(state.context_length)} · ` + drafting(state);
  say("facts", $("facts").title);
  const said = [...$("warnings").children].map((each) => each.textContent);
  if (said.join("\n") !== state.warnings.join("\n")) $("warnings").replaceChildren(...state.warnings.map((text) => make("p", text, "banner")));
}

async function poll() {
  try {
    const answer = await ask("stats", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.ok) {
      const state = await answer.json();
      dead = state.dead;
      told(state);
      await watch(state, performance.now());
      if (state.dead) status("dead", "engine dead", `The engine is gone: ${state.dead}. The server ends; what is shown is the last that it said.`);
      else if (state.draining) status("draining", "draining");
      else if (state.engines.some((each) => each.state !== "up")) status("draining", state.engines.some((each) => each.state === "up") ? "degraded" : "engine restarts");
      else status("ready", "ready");
    } else if (answer.status === 401) return status("key", "key needed");  // a new key calls poll again
    else if (answer.status === 503) status("loading", await reason(answer));
    else status("unreachable", "error", `The server does not give its numbers: ${await reason(answer)}`);
  } catch (error) {
    const why = dead ? `The engine is gone: ${dead}. The server has ended.` : "The server does not answer.";
    status("unreachable", "unreachable", why + " Trying again every second; what is shown is the last that it said.");
  }
  // A page that nobody looks at asks nothing.
  if (document.hidden) document.addEventListener("visibilitychange", () => setTimeout(poll, 0), { once: true });
  else setTimeout(poll, 1000);
}

document.addEventListener("DOMContentLoaded", poll);  // after all of this script
