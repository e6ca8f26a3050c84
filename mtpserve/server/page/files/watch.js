
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
  say("length-note", state.speculative_steps === 0 ? "plain decoding: no drafts" : length === null ? "no drafts yet" : recent ? `last 10 s · ${lifetime.toFixed(2)} since start` : "since start");
  say("rate", rate < 10 ? rate.toFixed(1) : whole(rate));
  say("rate-note", "last 10 s");
  say("waiting", whole(now.waiting));
  say("running", `${whole(now.running)} running`);
  say("pages", (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %");
  say("pages-note", `${whole(now.pages_used)} of ${whole(now.pages_total)} pages of ${whole(state.page_size)} tokens`);
  $("pages-bar").value = share;
  positions(state, now, recent ? then : null);
  depth(now, state.speculative_steps);
  sources(now);
  latency(state);
  cache(state, now, then);
  tiers(state.tiers);
  engines(state.engines);
  const totals = [["Prompt tokens", whole(now.prompt_tokens_total)], ["Generated tokens", whole(now.generation_tokens_total)], ["Engine steps", whole(now.steps_total)],
    ...(state.speculative_steps ? [["Steps with drafts, all requests", whole(now.drafts_total)]] : []), ["Preemptions (paused for memory)", whole(now.preemptions_total)], ["Failed requests", whole(now.failed_requests_total)]];
  $("totals").tBodies[0].replaceChildren(...totals.map(([head, cell]) => row(head, [cell])));
}

// Of the drafts at a position, those that were accepted; a tree has several drafts at one.
function positions(state, now, then) {
  $("positions-panel").hidden = $("trees-panel").hidden = state.speculative_steps === 0;
  $("positions").hidden = now.drafts_total === 0;
  $("positions-empty").hidden = now.drafts_total > 0;
  const reached = Math.max(state.speculative_steps, now.draft_tokens_per_position.findLastIndex((count) => count > 0) + 1);
  const since = (list, i) => then ? (now[list][i] || 0) - (then[list][i] || 0) : 0;
  const rows = now.accepted_tokens_per_position.slice(0, reached).map((count, i) => {
    const drafts = now.draft_tokens_per_position[i] || 0, accepted = since("accepted_tokens_per_position", i), lately = since("draft_tokens_per_position", i);
    const many = make("td", `${whole(count)} of ${whole(drafts)}`, "wraps");
    return row(String(i + 1), [bar(count / Math.max(1, drafts)), percent(accepted, lately), many, percent(count, drafts)]);
  });
  $("positions").tBodies[0].replaceChildren(...rows);
  say("positions-note", now.drafts_total ? `${plural(now.drafts_total, "step")} with drafts. Position 1 is the first draft of a step. Tokens that a grammar forces are not counted.` : "");
}

// Where the engine chooses how deep to draft; null: it does not.
function depth(now, deepest) {
  const chosen = now.depths;
  $("depth-panel").hidden = chosen === null;
  if (chosen === null) return;
  const expected = chosen.tokens_per_second === null ? "" : ` · ${whole(chosen.tokens_per_second)} tokens/s expected`;
  say("depth", whole(chosen.depth));
  say("depth-most", `tokens ahead now, at most ${whole(chosen.num_steps)}`);
  say("depth-note", chosen.adaptive ? `${plural(chosen.changes_total, "change")} · ${plural(chosen.trials_total, "test step")}${expected}` : "set by hand through /v1/spec");
  $("learned").tBodies[0].replaceChildren(...chosen.acceptance.slice(0, RANKS).map((rate, i) => row(String(i + 1), [bar(rate), percent(rate, 1)])));
  const steps = sum(now.steps_per_depth);
  $("depths").tBodies[0].replaceChildren(...now.steps_per_depth.slice(0, deepest + 1).map((count, i) => row(String(i), [bar(count / Math.max(1, steps)), whole(count), percent(count, steps)])));
}

const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

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
  const rows = [["Device memory", Math.max(0, found - sum(from.map(([, tokens]) => tokens)))], ...from, ["Not found", all - found]];
  const lately = then ? now.prompt_tokens_total - then.prompt_tokens_total : 0;
  say("cache-share", percent(found, all));
  say("cache-unit", `of ${plural(all, "prompt token")} found`);
  const kept = now.pages_cached ? ` · ${plural(now.pages_cached, "free page")} can be reused` : "";
  say("cache-note", (lately > 0 ? `last 10 s: ${percent(now.cached_prompt_tokens_total - then.cached_prompt_tokens_total, lately)} of ${whole(lately)}` : "no prompts in the last 10 s") + kept);
  $("cache").tBodies[0].replaceChildren(...rows.map(([head, tokens]) => row(head, [bar(tokens / Math.max(1, all)), whole(tokens), percent(tokens, all)])));
}

// With each answer of /stats; `at` in milliseconds.
async function watch(state, at) {
  show(state, at);
  if ($("view-watch").hidden) return;
  if (!state.dead) await Promise.all([remember(), live(state.engines.length)]);
  drawCharts(state);
  settle();
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
    return row(called(source) + (source === "grammar" ? ", forced tokens" : ""), [whole(count), whole(accepted), percent(accepted, count)], kind(source));
  }));
}

// A column for each; what is not counted, or was not measured yet, is a dash.
function tiers(found) {
  const known = (value, text) => value === null ? "–" : text(value), speed = (value) => known(value, (n) => n.toFixed(n < 10 ? 2 : 0));
  const facts = { "Pages": (tier) => known(tier.pages, whole), "Room for pages": (tier) => known(tier.pages_total, whole),
    "In use": (tier) => known(tier.pages, (pages) => percent(pages, tier.pages_total)), "Pages read back": (tier) => whole(tier.loaded_pages),
    "Write speed, GB/s": (tier) => speed(tier.write_gb_per_second), "Read speed, GB/s": (tier) => speed(tier.read_gb_per_second),
    "Failed transfers": (tier) => whole(tier.failed_transfers) };
  const heads = Object.keys(found).map((name) => { const head = make("th", TIERS[name] || name); head.scope = "col"; return head; }), top = make("tr");
  $("tiers-panel").hidden = heads.length === 0;
  top.append(make("td"), ...heads);
  $("tiers").tHead.replaceChildren(top);
  $("tiers").tBodies[0].replaceChildren(...Object.entries(facts).map(([head, fact]) => row(head, Object.values(found).map(fact))));
}

// Why one failed is said below them.
function engines(all) {
  $("engines").tBodies[0].replaceChildren(...all.map(({ engine, state, restarts, stats }) =>
    row(`${engine}, ${state}`, [whole(stats.running), whole(stats.waiting), percent(stats.pages_used, stats.pages_total), whole(stats.generation_tokens_total), whole(restarts)])));
  say("engines-note", all.filter((each) => each.reason).map((each) => `Engine ${each.engine} failed: ${each.reason}`).join("; ") || "No engine has failed.");
}

// -------------------------------------------------------------------------------------------- where panels stand

const COLUMN = 340, GAP = 10, WASTE = 40, PHONE = matchMedia("(max-width: 480px)");
let placed = { key: "", columns: [], many: 0 };  // the column of each panel that is seen

// A panel's height without what it was stretched by.
function natural(panel) {
  const inside = panel.open ? panel.lastElementChild : panel.firstElementChild, style = getComputedStyle(panel);
  return Math.ceil(inside.getBoundingClientRect().bottom - panel.getBoundingClientRect().top + parseFloat(style.paddingBottom) + parseFloat(style.borderBottomWidth));
}
function tall(heights, columns, many) {
  const all = Array(many).fill(-GAP);
  heights.forEach((height, i) => { all[columns[i]] += height + GAP; });
  return all;
}
const waste = (all) => Math.max(...all) - Math.min(...all);

// The columns whose heights differ least; of those that are as good, the one nearest to the panels' order. There are few panels: all ways are tried.
function packed(heights, many) {
  let best = null, least = Infinity;
  (function next(columns, sums, turns) {
    const i = columns.length;
    if (i === heights.length) {
      const cost = waste(sums) + 4 * turns;
      if (cost < least) { best = [...columns]; least = cost; }
      return;
    }
    for (let at = 0; at < many && at <= i; at += 1) {
      sums[at] += heights[i] + GAP;
      columns.push(at);
      next(columns, sums, turns + (i > 0 && at < columns[i - 1]));
      columns.pop();
      sums[at] -= heights[i] + GAP;
    }
  })([], Array(many).fill(0), 0);
  return best;
}

// As many columns as there is room for, or fewer where that leaves much less room empty.
function arranged(heights, room) {
  let best = null, least = Infinity;
  for (let many = Math.min(heights.length, room); many > 1; many -= 1) {
    const columns = packed(heights, many), all = tall(heights, columns, many), share = waste(all) / Math.max(...all) + 0.15 * (room - many);
    if (share < least) { best = { columns, many }; least = share; }
  }
  return best;
}

// Panels stay where they are until another place is much better. What is left below a column is shared by its panels.
function settle() {
  const side = $("side"), panels = [...side.children].filter((panel) => !panel.hidden), room = Math.floor((side.clientWidth + GAP) / (COLUMN + GAP));
  side.classList.toggle("settled", room > 1 && panels.length > 1);
  if (room < 2 || panels.length < 2) {
    for (const panel of panels) panel.style.gridArea = "";
    side.style.gridTemplateColumns = "";
    placed.key = "";
    return;
  }
  const heights = panels.map(natural), key = [room, ...panels.map((panel) => panel.querySelector("h2").textContent + panel.open)].join(), better = arranged(heights, room);
  const left = ({ columns, many }) => waste(tall(heights, columns, many));
  if (key !== placed.key || left(placed) > left(better) + WASTE) placed = { key, ...better };
  const { many } = placed;
  side.style.gridTemplateColumns = `repeat(${many}, minmax(0, 1fr))`;
  const all = tall(heights, placed.columns, many), most = Math.max(...all), below = Array(many).fill(1);
  panels.forEach((panel, i) => {
    const at = placed.columns[i], mates = placed.columns.filter((each) => each === at).length, last = placed.columns.lastIndexOf(at) === i;
    const height = last ? most + 1 - below[at] : heights[i] + Math.floor((most - all[at]) / mates);
    panel.style.gridArea = `${below[at]} / ${at + 1} / span ${height}`;
    below[at] += height + GAP;
  });
}

for (const panel of document.querySelectorAll(".fold")) {
  if (PHONE.matches && !panel.matches(".first")) panel.open = false;  // a telephone's screen shows the heads of all
  panel.addEventListener("toggle", settle);
}
$("costs-details").addEventListener("toggle", settle);
new ResizeObserver(settle).observe($("view-watch"));
$("charts-all").addEventListener("click", () => {
  const few = $("charts").classList.toggle("few");
  $("charts-all").setAttribute("aria-expanded", !few);
  say("charts-all", few ? "All charts" : "Fewer charts");
  if (served) drawCharts(served);
});
