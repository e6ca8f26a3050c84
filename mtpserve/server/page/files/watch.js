
// ----------------------------------------------------------------------------------------------------------- watch

let past = [];  // {at, stats}: one a second, the youngest last

function row(head, cells, key) {
  const made = make("tr"), first = make("th");
  first.scope = "row";
  if (key) first.append(make("span", "", "key " + key));
  first.append(head);
  made.append(first, ...cells.map((cell) => typeof cell === "string" ? make("td", cell) : cell));
  return made;
}

function bar(share) {
  const cell = make("td", undefined, "bar"), svg = drawn("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(drawn("rect", { x: 0, y: 0, height: 10, width: (100 * Math.min(1, share)).toFixed(1) }));
  cell.append(svg);
  return cell;
}

function show(state, at) {
  const now = state.stats, last = past.at(-1);
  if (last && now.steps_total < last.stats.steps_total) past = [];  // it was restarted
  past.push({ at, stats: now });
  while (past.length > 1 && past[1].at <= at - 1000 * WINDOW_S) past.shift();
  const then = past[0].stats, seconds = (at - past[0].at) / 1000;
  const drafts = now.drafts_total - then.drafts_total, recent = drafts > 0;
  const accepted = now.accepted_tokens_total - then.accepted_tokens_total;
  const lifetime = now.drafts_total > 0 ? 1 + now.accepted_tokens_total / now.drafts_total : null;
  const length = recent ? 1 + accepted / drafts : lifetime;
  const rate = seconds > 0 ? (now.generation_tokens_total - then.generation_tokens_total) / seconds : 0;
  const share = now.pages_total > 0 ? now.pages_used / now.pages_total : 0;

  say("length", length === null ? "–" : length.toFixed(2));
  say("length-note", length === null ? "no drafts yet" : recent ? `last 10 s · ${lifetime.toFixed(2)} since start` : "since start");
  say("rate", rate < 10 ? rate.toFixed(1) : whole(rate));
  say("rate-note", "last 10 s");
  say("waiting", whole(now.waiting));
  say("running", `${whole(now.running)} running`);
  say("pages", (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %");
  say("pages-note", `${whole(now.pages_used)} of ${whole(now.pages_total)}, ${whole(state.page_size)} tokens each` + (now.pages_cached ? ` · ${whole(now.pages_cached)} free ones cached` : ""));
  $("pages-bar").value = share;
  positions(state, now, recent ? then : null);
  depth(now, state.speculative_steps);
  sources(now);
  latency(state);
  cache(state, now, then);
  tiers(state.tiers);
  engines(state.engines);
  const totals = [["Prompt tokens", whole(now.prompt_tokens_total)], ["Generated tokens", whole(now.generation_tokens_total)], ["Steps", whole(now.steps_total)],
    ["Verifications", whole(now.drafts_total)], ["Preemptions", whole(now.preemptions_total)], ["Failed requests", whole(now.failed_requests_total)]];
  $("totals").tBodies[0].replaceChildren(...totals.map(([head, cell]) => row(head, [cell])));
}

// Of the drafts at a position, those that were accepted; a tree has several drafts at one.
function positions(state, now, then) {
  $("positions").hidden = now.drafts_total === 0;
  $("positions-empty").hidden = now.drafts_total > 0;
  if (state.speculative_steps === 0) say("positions-empty", "Plain decoding: this server drafts nothing. See --speculative-algorithm.");
  const reached = Math.max(state.speculative_steps, now.draft_tokens_per_position.findLastIndex((count) => count > 0) + 1);
  const since = (list, i) => then ? (now[list][i] || 0) - (then[list][i] || 0) : 0;
  const rows = now.accepted_tokens_per_position.slice(0, reached).map((count, i) => {
    const drafts = now.draft_tokens_per_position[i] || 0, accepted = since("accepted_tokens_per_position", i), lately = since("draft_tokens_per_position", i);
    const many = make("td", `${whole(count)} of ${whole(drafts)}`, "wraps");
    return row(String(i + 1), [bar(count / Math.max(1, drafts)), percent(accepted, lately), many, percent(count, drafts)]);
  });
  $("positions").tBodies[0].replaceChildren(...rows);
  say("positions-note", now.drafts_total ? `${whole(now.drafts_total)} verifications. Position 1 is the first token after the model's own.` : "");
}

// Where the engine chooses how deep to draft; null: it does not.
function depth(now, deepest) {
  const chosen = now.depths;
  $("depth-panel").hidden = chosen === null;
  if (chosen === null) return;
  const expected = chosen.tokens_per_second === null ? "" : ` · ${whole(chosen.tokens_per_second)} tokens/s expected`;
  say("depth", whole(chosen.depth));
  say("depth-most", `of at most ${whole(chosen.num_steps)}`);
  say("depth-note", chosen.adaptive ? `${whole(chosen.changes_total)} changes · ${whole(chosen.trials_total)} trials${expected}` : "fixed until it is adaptive again");
  $("learned").tBodies[0].replaceChildren(...chosen.acceptance.slice(0, RANKS).map((rate, i) => row(String(i + 1), [bar(rate), percent(rate, 1)])));
  const steps = sum(now.steps_per_depth);
  $("depths").tBodies[0].replaceChildren(...now.steps_per_depth.slice(0, deepest + 1).map((count, i) => row(String(i), [bar(count / Math.max(1, steps)), whole(count), percent(count, steps)])));
}

// 38 ms, 1.2 s.
function lasting(seconds) {
  const [value, unit] = seconds < 1 ? [1000 * seconds, "ms"] : [seconds, "s"];
  return `${value.toFixed(value < 10 ? 1 : 0).replace(/\.0$/, "")} ${unit}`;
}

// A histogram knows a value only to its bucket: the bounds are said below it.
const LATENCIES = { first_token: "First token", between_tokens: "Between tokens", whole_request: "Whole request" };
function latency(state) {
  const span = $("latency-span").value;
  const cell = (one) => {
    const made = make("td", one === null ? "–" : one.high === null ? `> ${lasting(one.low)}` : lasting(one.seconds));
    if (one !== null && one.high !== null) made.append(make("span", `${lasting(one.low).replace(one.low < 1 === one.high < 1 ? / .*/ : "", "")} – ${lasting(one.high)}`, "bounds"));
    return made;
  };
  $("latency").tBodies[0].replaceChildren(...Object.entries(LATENCIES).map(([name, called]) => {
    const found = state.latency[name][span];
    const made = row(called, [cell(found.p50), cell(found.p90), cell(found.p99)]);
    made.firstChild.append(make("span", `of ${whole(found.count)}`, "bounds"));
    return made;
  }));
}

// Where prompt tokens came from. What a tier gave came to the device first: the rest of what was found was there.
function cache(state, now, then) {
  const all = now.prompt_tokens_total, found = now.cached_prompt_tokens_total;
  const from = Object.entries(now.loaded_pages).map(([tier, pages]) => [TIERS[tier] || tier, pages * state.page_size]).filter(([, tokens]) => tokens > 0);
  const rows = [["Device", Math.max(0, found - sum(from.map(([, tokens]) => tokens)))], ...from, ["Computed", all - found]];
  const lately = then ? now.prompt_tokens_total - then.prompt_tokens_total : 0;
  say("cache-share", percent(found, all));
  say("cache-unit", `of ${whole(all)} prompt tokens were found`);
  say("cache-note", lately > 0 ? `last 10 s: ${percent(now.cached_prompt_tokens_total - then.cached_prompt_tokens_total, lately)} of ${whole(lately)}` : "no prompts in the last 10 s");
  $("cache").tBodies[0].replaceChildren(...rows.map(([head, tokens]) => row(head, [bar(tokens / Math.max(1, all)), whole(tokens), percent(tokens, all)])));
}

// With each answer of /stats; `at` in milliseconds.
async function watch(state, at) {
  show(state, at);
  if ($("view-watch").hidden) return;
  if (!state.dead) await Promise.all([remember(), live(state.engines.length)]);
  drawCharts(state);
  if ($("costs-details").open && !state.dead) await costs();
}

// The steps that were seen most often, the small ones first.
async function costs() {
  const answer = await ask("v1/spec", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) return;
  const all = (await answer.json()).step_times, least = all.map((step) => step.seen).sort((a, b) => b - a)[STEPS - 1] || 0;
  $("costs").tBodies[0].replaceChildren(...all.filter((step) => step.seen >= least).slice(0, STEPS).map((step) => row(whole(step.requests) + (step.sampled ? ", sampled" : ""), [whole(step.rows), whole(step.passes), step.milliseconds.toFixed(step.milliseconds < 10 ? 2 : 1), whole(step.seen)])));
}

// What the draft model is called.
const drafter = (now) => called(Object.keys(now.draft_tokens_by_source).find((source) => kind(source) === "mtp") || "mtp");

function sources(now) {
  if (SOURCES.mtp !== drafter(now)) { SOURCES.mtp = drafter(now); legend(); }
  const used = Object.entries(now.draft_tokens_by_source).filter(([, count]) => count > 0);
  $("sources-panel").hidden = used.length === 0;
  $("sources").tBodies[0].replaceChildren(...used.map(([source, count]) => {
    const accepted = now.accepted_tokens_by_source[source] || 0;
    return row(called(source), [whole(count), whole(accepted), percent(accepted, count)], kind(source));
  }));
}

// A column for each; what is not counted, or was not measured yet, is a dash.
function tiers(found) {
  const known = (value, text) => value === null ? "–" : text(value), speed = (value) => known(value, (n) => n.toFixed(n < 10 ? 2 : 0));
  const facts = { "Pages": (tier) => known(tier.pages, whole), "Of": (tier) => known(tier.pages_total, whole),
    "In use": (tier) => known(tier.pages, (pages) => percent(pages, tier.pages_total)), "Loaded from it": (tier) => whole(tier.loaded_pages),
    "Written, GB/s": (tier) => speed(tier.write_gb_per_second), "Read, GB/s": (tier) => speed(tier.read_gb_per_second),
    "Failed transfers": (tier) => whole(tier.failed_transfers) };
  const heads = Object.keys(found).map((name) => { const head = make("th", TIERS[name] || name); head.scope = "col"; return head; }), top = make("tr");
  $("tiers-panel").hidden = heads.length === 0;
  top.append(make("td"), ...heads);
  $("tiers").tHead.replaceChildren(top);
  $("tiers").tBodies[0].replaceChildren(...Object.entries(facts).map(([head, fact]) => row(head, Object.values(found).map(fact))));
}

// Why one was lost is said below them.
function engines(all) {
  $("engines").tBodies[0].replaceChildren(...all.map(({ engine, state, restarts, stats }) =>
    row(`${engine}, ${state}`, [whole(stats.running), whole(stats.waiting), percent(stats.pages_used, stats.pages_total), whole(stats.generation_tokens_total), whole(restarts)])));
  say("engines-note", all.filter((each) => each.reason).map((each) => `engine ${each.engine} was lost: ${each.reason}`).join("; ") || "none was lost");
}
