
// ---------------------------------------------------------------------------------------------------------- charts

let timeline = null;  // the server's history: columns, the oldest sample first; times are seconds since the server began
let heard = 0;        // when it was read last, in performance.now()'s milliseconds
const HIGH = 128, YOUNG_S = 20, EDGE = { left: 40, right: 10, top: 10, bottom: 20 }, KINDS = ["", " second"];
const mean = (list) => list.length ? sum(list) / list.length : null;
const known = (list) => list.filter((value) => value !== null);
const inPercent = (value) => `${(100 * value).toFixed(0)} %`;
const fine = (value) => value.toFixed(2);
const count = (value) => value < 10 && value % 1 ? value.toFixed(1) : whole(value);

// `first`: on a telephone, too; `lines`: their columns; `top`: of the scale, where the values do not say it; `told`: what a minute of the first line is in the table.
const CHARTS = [
  { id: "rate", title: "Tokens per second", first: true, lines: { "": (h) => h.tokens_per_second }, text: count, told: mean },
  { id: "requests", title: "Requests", lines: { running: (h) => h.running, waiting: (h) => h.waiting }, text: count, told: (list) => Math.max(...list) },
  { id: "pages", title: "KV cache in use", lines: { "": (h) => h.pages_used.map((used, i) => used / Math.max(1, h.pages_total[i])) }, text: inPercent, top: () => 1, told: mean },
  { id: "length", title: "Acceptance length", first: true, lines: { "": (h) => h.accept_length }, text: fine, low: 1, top: (state) => state.speculative_steps + 1, drafts: true, told: mean },
  { id: "depth", title: "Draft length, mean", lines: { "": (h) => h.depth }, text: fine, top: (state) => Math.max(1, state.speculative_steps), drafts: true, told: mean },
  { id: "cached", title: "Prompt tokens cached", lines: { "": (h) => h.cached_share }, text: inPercent, top: () => 1, told: mean },
];

async function remember() {
  if (timeline && performance.now() - heard < 1000 * timeline.interval_s - 200) return;
  const answer = await ask("stats/history" + (timeline && timeline.at.length ? `?since=${timeline.at.at(-1)}` : ""), { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) return;
  const found = await answer.json(), before = timeline;
  heard = performance.now();
  if (before && before.now > found.now) { timeline = null; return; }  // the server was restarted
  const first = before ? before.at.findIndex((at) => at >= found.now - found.kept_s) : 0;
  if (before) for (const [name, column] of Object.entries(found)) if (Array.isArray(column)) found[name] = [...(first < 0 ? [] : before[name].slice(first)), ...column];
  timeline = found;
}

const clock = (at) => new Date(Date.now() - 1000 * (timeline.now + (performance.now() - heard) / 1000 - at));
// What is drawn: ten minutes, or as much of them as a young server has.
const span = () => Math.min(timeline.kept_s, Math.max(YOUNG_S, timeline.now - (timeline.at[0] ?? timeline.now)));
const lately = () => span() >= timeline.kept_s ? "ten minutes" : span() < 120 ? plural(Math.round(span()), "second") : plural(Math.round(span() / 60), "minute");
const minute = (at) => clock(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
const second = (at) => clock(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

function drawCharts(state) {
  if (!timeline) return;
  const wanted = CHARTS.filter((each) => !each.drafts || state.speculative_steps > 0);
  $("charts").classList.toggle("four", wanted.length === 4);  // in twos: no place stays empty
  for (const each of wanted) drawChart(each, $(`chart-${each.id}`) || framed(each), state);
  if ($("minutes-details").open) minutes(wanted);
}

function framed(chart) {
  const figure = make("figure", undefined, chart.first ? "panel first" : "panel"), caption = make("figcaption");
  figure.id = "chart-" + chart.id;
  caption.append(make("h2", chart.title), make("span", "", "note"));
  figure.append(caption, make("div"));
  $("charts").append(figure);
  return figure;
}

// 1, 2 or 5 times a power of ten, above all values.
function rounded(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= most * 0.9999);
}

// In words: what is now, and the highest value with its time.
function summary(chart, each) {
  return Object.entries(each).map(([name, values]) => {
    const all = known(values), named = name && " " + name;
    if (!all.length) return [`nothing yet${named}`, ""];
    const most = Math.max(...all), last = values.at(-1), when = minute(timeline.at[values.lastIndexOf(most)]);
    return [`${last === null ? "–" : chart.text(last)}${named || " now"} · peak ${chart.text(most)}`, ` at ${when}`];
  });
}

function drawChart(chart, figure, state) {
  const columns = Object.fromEntries(Object.entries(chart.lines).map(([name, of]) => [name, of(timeline)]));
  const place = figure.lastChild, wide = Math.max(200, place.clientWidth), low = chart.low || 0;
  const most = Math.max(...known(Object.values(columns).flat()), 0), top = Math.max(chart.top ? chart.top(state) : rounded(Math.max(most, 1)), most);
  const begin = timeline.now - span();
  const x = (at) => EDGE.left + (wide - EDGE.left - EDGE.right) * (at - begin) / span();
  const y = (value) => HIGH - EDGE.bottom - (HIGH - EDGE.top - EDGE.bottom) * (value - low) / (top - low);
  const words = summary(chart, columns);
  const svg = drawn("svg", { width: wide, height: HIGH, role: "img", "aria-label": `${chart.title}, the last ${lately()}: ${words.map((each) => each.join("")).join("; ")}` });
  svg.append(...axes(chart, low, top, wide, x, y));
  Object.values(columns).forEach((values, i) => svg.append(...traced(values, x, y, KINDS[i])));
  const [first] = Object.values(columns), highest = Math.max(...known(first));
  if (known(first).length && highest > low) svg.append(drawn("circle", { cx: x(timeline.at[first.lastIndexOf(highest)]).toFixed(1), cy: y(highest).toFixed(1), r: 3, class: "peak" }));
  place.replaceChildren(svg);
  figure.querySelector(".note").replaceChildren(...words.flatMap(([text, when], i) => words.length > 1 ? [make("span", "", "swatch" + KINDS[i]), text + " "] : [text + when]));
}

function axes(chart, low, top, wide, x, y) {
  const step = [5, 10, 15, 30, 60, 120, 300].find((seconds) => (wide - EDGE.left) * seconds / span() >= (seconds < 60 ? 76 : 56)), time = step < 60 ? second : minute;
  const made = [], label = (at, text, anchor, high) => {
    const written = drawn("text", { x: at.toFixed(1), y: high.toFixed(1), "text-anchor": anchor });
    written.textContent = text;
    return written;
  };
  for (const value of chart.text === count && top < 2 ? [low, top] : [low, (low + top) / 2, top]) {
    made.push(drawn("line", { x1: EDGE.left, x2: wide - EDGE.right, y1: y(value).toFixed(1), y2: y(value).toFixed(1), class: "grid" }));
    made.push(label(EDGE.left - 6, chart.text === fine ? String(+value.toFixed(1)) : chart.text(value), "end", y(value) + 4));
  }
  const offset = (clock(timeline.now).getTime() / 1000) % step, half = step < 60 ? 26 : 18;  // to the last even minute, or part of one
  for (let at = timeline.now - offset; at > timeline.now - span(); at -= step)
    if (x(at) > EDGE.left - 2 + half / 2 && x(at) < wide - half) made.push(label(x(at), time(at + 0.5), "middle", HIGH - 5));
  return made;
}

// Where nothing is known the line has a gap; a value between two gaps is a dot.
function traced(values, x, y, kind) {
  const runs = [[]];
  values.forEach((value, i) => {
    const broken = i > 0 && timeline.at[i] - timeline.at[i - 1] > 3 * timeline.interval_s;
    if (value === null || broken) runs.push([]);
    if (value !== null) runs.at(-1).push([x(timeline.at[i]).toFixed(1), y(value).toFixed(1)]);
  });
  return runs.filter((run) => run.length).map((run) => run.length === 1
    ? drawn("circle", { cx: run[0][0], cy: run[0][1], r: 1.5, class: "dot" + kind }) : drawn("polyline", { points: run.map((point) => point.join(",")).join(" "), class: "line" + kind }));
}

// The same as numbers, for who cannot see charts: means of a minute, of requests the most.
function minutes(wanted) {
  const heads = wanted.flatMap((chart) => Object.keys(chart.lines).map((name) => name ? `${chart.title}, ${name}` : chart.title)), top = make("tr");
  const columns = wanted.flatMap((chart) => Object.values(chart.lines).map((of) => [chart, of(timeline)])), by = Map.groupBy(timeline.at.keys(), (i) => minute(timeline.at[i]));
  top.append(...["Minute", ...heads].map((text) => { const head = make("th", text); head.scope = "col"; return head; }));
  $("minutes").tHead.replaceChildren(top);
  $("minutes").tBodies[0].replaceChildren(...[...by].reverse().map(([when, samples]) => row(when, columns.map(([chart, values]) => {
    const there = known(samples.map((i) => values[i]));
    return there.length ? chart.text(chart.told(there)) : "–";
  }))));
}
