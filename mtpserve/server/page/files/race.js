
// ------------------------------------------------------------------------------------------------------ side by side

{
  // Logits this close change their order by rounding alone, where several tokens are computed together.
  const TIE = 0.05, LANES = ["fast", "plain"];
  const PAINT_MS = 100;  // while it is measured: a server on this machine needs the core more than the picture does
  let racing = null, runs = null, replaying = null, painting = null;

  const named = (id) => `token_id:${id}`;
  // [{name, logprob, top: {name: logprob}}] of either API's chunk.
  function scores(given) {
    if (!given) return [];
    if (given.content) return given.content.map((each) => ({ logprob: each.logprob, top: Object.fromEntries(each.top_logprobs.map((one) => [one.token, one.logprob])) }));
    return given.tokens.map((token, i) => ({ logprob: given.token_logprobs[i], top: given.top_logprobs[i] || {} }));
  }

  // A run: its steps with the time at which each arrived, in ms since the request, and the scores of its tokens. Neither finds the other's prompt cached.
  async function run(lane, mark, each, most = Number($("race-tokens").value)) {
    const chat = $("race-kind").value === "chat", prompt = $("race-prompt").value, made = { steps: [], scores: [], total: 0 };
    const asked = {
      model: served?.model || "", max_tokens: most, temperature: Number($("race-temperature").value), seed: Number($("race-seed").value),
      stream: true, return_spec_trace: true, return_tokens_as_token_ids: true, cache_salt: `${mark}-${lane}`,
      ...(chat ? { messages: [{ role: "user", content: prompt }], logprobs: true, top_logprobs: 5 } : { prompt, logprobs: 5 }),
      ...(lane === "plain" ? { speculative: { enabled: false } } : {}),
    };
    const began = performance.now();
    const answer = await ask(chat ? "v1/chat/completions" : "v1/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal: racing.signal });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const chunk of events(answer)) for (const choice of chunk.choices) {
      for (const step of choice.spec_trace || []) made.steps.push({ ...step, at: performance.now() - began });
      made.scores.push(...scores(choice.logprobs));
      if (choice.spec_trace?.length) { made.total = performance.now() - began; each(lane, made); }
    }
    return made;
  }

  const ids = (made) => made.steps.flatMap((step) => step.tokens);
  const texts = (made) => made.steps.flatMap((step) => step.texts);
  const rate = (made) => 1000 * ids(made).length / made.total;

  function facts(lane, made, shown) {
    const tokens = sum(made.steps.slice(0, shown).map((step) => step.tokens.length)), last = made.steps[shown - 1];
    say(lane + "-rate", last ? whole(1000 * tokens / last.at) : "–");
    say(lane + "-facts", last ? `${whole(tokens)} tokens · ${(tokens / shown).toFixed(2)} per step · first after ${whole(made.steps[0].at)} ms · ${(last.at / 1000).toFixed(2)} s` : made.note || "");
  }

  // Both as they were at `now` ms: what is there already stays.
  function drawTo(now) {
    for (const lane of LANES) {
      const made = runs[lane], box = $(lane + "-text"), due = made.steps.filter((step) => step.at <= now).length;
      for (let shown = Number(box.dataset.steps); shown < due; shown += 1) box.append(...painted(made.steps[shown], shown + 1, new Map()));
      box.dataset.steps = due;
      box.scrollTop = box.scrollHeight;
      facts(lane, made, due);
    }
  }
  function empty() {
    clearTimeout(painting);
    painting = null;
    for (const lane of LANES) { $(lane + "-text").replaceChildren(); $(lane + "-text").dataset.steps = 0; say(lane + "-facts", ""); say(lane + "-rate", "–"); }
  }
  function measuring(yes) { for (const lane of LANES) $(lane + "-text").classList.toggle("measuring", yes); }
  function replay() {
    empty();
    measuring(false);
    cancelAnimationFrame(replaying);
    say("race-verdict", "Replaying both at their real speed …");
    const began = performance.now(), end = Math.max(...LANES.map((lane) => runs[lane].total));
    const frame = (now) => {
      const at = matchMedia("(prefers-reduced-motion: reduce)").matches ? end : now - began;
      drawTo(at);
      if (at < end) replaying = requestAnimationFrame(frame);
      else verdict();
    };
    replaying = requestAnimationFrame(frame);
  }

  // Equal, or the first token at which they part and what the model gave both of them there.
  function compared() {
    const fast = ids(runs.fast), plain = ids(runs.plain), at = plain.findIndex((id, i) => id !== fast[i]);
    if (at < 0 && fast.length === plain.length) return `The texts are equal: all ${whole(plain.length)} tokens.`;
    const place = at < 0 ? plain.length : at, [one, other] = [texts(runs.fast)[place], texts(runs.plain)[place]].map((text) => text === undefined ? "the end" : JSON.stringify(text));
    const nodes = LANES.map((lane) => $(lane + "-text").querySelectorAll(".t")[place]);
    for (const node of nodes) node?.classList.add("differs");
    const top = runs.plain.scores[place]?.top || {}, given = [top[named(fast[place])], top[named(plain[place])]];
    const head = `The texts differ from token ${whole(place + 1)} on: ${one} with drafts, ${other} without.`;
    if (Number($("race-temperature").value) > 0) return `${head} Above temperature 0 tokens are drawn, from the same distribution, in another way.`;
    if (given.some((score) => score === undefined)) return `${head} The model did not list both among its five likeliest tokens.`;
    const numbers = given.map((score) => score.toFixed(4)).join(" and ");
    return `${head} Their log-probabilities were ${numbers}: ${Math.abs(given[0] - given[1]) <= TIE ? "a tie, which rounding decides." : "no tie."}`;
  }
  function verdict() {
    const ratio = rate(runs.fast) / rate(runs.plain);
    $("race-verdict").className = "";
    $("race-verdict").replaceChildren(make("b", `${ratio.toFixed(2)} × the speed with drafts.`), " " + compared());
  }

  async function race() {
    const mark = `race-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`, both = $("race-how").value === "both";
    racing = new AbortController();
    cancelAnimationFrame(replaying);
    runs = { fast: { steps: [], scores: [], total: 0, note: both ? "" : "Starts when the run without drafts has ended." }, plain: { steps: [], scores: [], total: 0 } };
    empty();
    drawTo(0);
    $("race-start").disabled = $("race-again").disabled = true;
    $("race-stop").disabled = false;
    $("race-verdict").className = "";
    say("race-verdict", both ? "Measuring both …" : "One token first, to warm up …");
    measuring(!both);
    const live = (lane, made) => {
      runs[lane] = made;
      painting ??= setTimeout(() => {
        painting = null;
        drawTo(Infinity);
        if (!both) say("race-verdict", `Measuring ${lane === "fast" ? "with drafts" : "without drafts"}: ${whole(ids(made).length)} tokens`);
      }, PAINT_MS);
    };
    try {
      if (both) [runs.fast, runs.plain] = await Promise.all(LANES.map((lane) => run(lane, mark, live)));
      else await run("plain", mark + "-first", () => {}, 1);  // a server that was idle is slower at first: neither run has to pay for it
      if (!both) for (const lane of ["plain", "fast"]) {
        runs[lane] = await run(lane, mark, live);
        drawTo(Infinity);  // its last steps, before the other run's first ones
      }
      $("race-again").disabled = false;
      if (both) { drawTo(Infinity); verdict(); } else replay();
    } catch (error) {
      const stopped = error.name === "AbortError";
      racing.abort();  // the other one, too
      clearTimeout(painting);
      painting = null;
      say("race-verdict", stopped ? "Stopped." : error instanceof TypeError ? "The server does not answer." : error.message);
      $("race-verdict").className = stopped ? "" : "bad";
    }
    racing = null;
    $("race-start").disabled = false;
    $("race-stop").disabled = true;
  }

  $("race-form").addEventListener("submit", (event) => { event.preventDefault(); if (!racing) race(); });
  $("race-stop").addEventListener("click", () => racing?.abort());
  $("race-again").addEventListener("click", replay);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") racing?.abort(); });
}
