
// ------------------------------------------------------------------------------------------------------ draft trees

// A step's drafts as a tree, from left to right; what became text is the straight line at the top.
//   the token before ─ accepted ─ accepted ─ the model's own
//                    └ rejected └ rejected
const DRAWN = 6, WIDE = 520, ROW = 30, BOX = 22;
const visible = (text) => text.replaceAll("\n", "\u23CE").replaceAll("\t", "\u21E5").replace(/^ +| +$/g, (spaces) => "\u00B7".repeat(spaces.length)) || "\u2205";

function grown(step, before) {
  const start = { text: before, kind: "start", children: [] }, nodes = [start];
  for (const draft of step.proposed) nodes.push({ text: draft.text, source: draft.source, kind: draft.accepted ? "accepted" : "rejected", children: [] });
  const path = [start];
  step.proposed.forEach((draft, i) => {
    nodes[draft.parent].children.push(nodes[i + 1]);
    if (draft.accepted) path.push(nodes[i + 1]);
  });
  step.tokens.slice(path.length - 1).forEach((_, i) => {
    const own = { text: step.texts[path.length - 1 + i], kind: "own", children: [] };
    path.at(-1).children.unshift(own);
  });
  for (const node of nodes) node.children.sort((a, b) => (b.kind !== "rejected") - (a.kind !== "rejected"));
  return start;
}

// Each node's column is its depth; a node stands in the row of its first child. → rows and columns that were used.
function laid(node, depth, line) {
  node.depth = depth; node.line = line;
  let next = line, deepest = depth;
  node.children.forEach((child, i) => { const [below, far] = laid(child, depth + 1, i ? next : line); next = below; deepest = Math.max(deepest, far); });
  return [Math.max(next, line + 1), deepest];
}

// In words: the path, then what was rejected, and after which token.
function told_tree(start) {
  const path = [], rejected = [];
  (function visit(node) {
    for (const child of node.children) {
      if (child.kind === "rejected") rejected.push(`“${visible(child.text)}” after “${visible(node.text)}”`);
      else path.push(`${child.kind === "own" ? "the model's own" : `accepted from ${called(child.source)}:`} “${visible(child.text)}”`);
      visit(child);
    }
  })(start);
  return `After “${visible(start.text)}”: ${path.join(", ")}. ${rejected.length ? `Rejected: ${rejected.join(", ")}.` : "None was rejected."}`;
}

function pictured(start, room) {
  const [lines, deepest] = laid(start, 0, 0), column = Math.max(58, Math.min(112, Math.floor((room - 4) / (deepest + 1)))), box = column - 16;
  const svg = drawn("svg", { width: column * (deepest + 1) - 12, height: lines * ROW, role: "img", "aria-label": told_tree(start) }), edges = [], boxes = [];
  (function visit(node) {
    const left = 2 + node.depth * column, middle = 2 + node.line * ROW + BOX / 2, style = node.kind + (node.source ? ` ${kind(node.source)}` : "");
    const group = drawn("g", { class: style }), label = drawn("text", { x: left + 5, y: middle + 4 }), full = drawn("title", {}), fits = Math.floor((box - 8) / 7.3), text = visible(node.text);
    label.textContent = text.length > fits ? text.slice(0, fits - 1) + "…" : text;
    full.textContent = `${text}: ${{ start: "the token before", own: "the model's own" }[node.kind] || `${node.kind} draft from ${called(node.source)}`}`;
    group.append(full, drawn("rect", { x: left, y: middle - BOX / 2, width: box, height: BOX, rx: 4 }), label);
    boxes.push(group);
    for (const child of node.children) {
      const high = 2 + child.line * ROW + BOX / 2, from = left + box, to = left + column;
      edges.push(drawn("path", { d: child.line === node.line ? `M${from} ${middle}H${to}` : `M${from} ${middle}H${from + 8}V${high}H${to}`, class: `edge ${child.kind}` + (child.source ? ` ${kind(child.source)}` : "") }));
      visit(child);
    }
  })(start);
  // What was chosen is drawn over the others.
  svg.append(...edges.sort((a, b) => b.classList.contains("rejected") - a.classList.contains("rejected")), ...boxes);
  return svg;
}

function drawTrees(steps) {
  const before = ["the prompt", ...steps.map((step) => step.texts.at(-1) || "")], made = [];
  steps.forEach((step, i) => {
    if (!step.proposed.length || !step.tokens.length) return;
    const accepted = step.proposed.filter((draft) => draft.accepted).length, chain = step.proposed.every((draft, at) => draft.parent === at);
    const block = make("div"), scroll = make("div", undefined, "scroll");
    block.append(make("h3", `Step ${i + 1}, ${chain ? "a chain" : "a tree"}: ${accepted} of ${step.proposed.length} drafts accepted`), scroll);
    scroll.append(pictured(grown(step, before[i]), Math.min(WIDE, $("trees").clientWidth)));
    made.push([block, scroll]);
  });
  $("trees").replaceChildren(...made.slice(-DRAWN).map(([block]) => block));
  for (const [block, scroll] of made.slice(-DRAWN)) if (scroll.scrollWidth > scroll.clientWidth) {
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", block.firstChild.textContent);
  }
  $("trees-legend").hidden = made.length === 0;
  return made.length;
}

async function trees() {
  const chat = $("trees-kind").value === "chat", prompt = $("trees-prompt").value, steps = [];
  const asked = { ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }), max_tokens: 32, temperature: 0, stream: true, return_spec_trace: true };
  $("trees-send").disabled = true;
  say("trees-note", "waiting for the model");
  try {
    const answer = await ask(chat ? "v1/chat/completions" : "v1/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const chunk of events(answer)) for (const choice of chunk.choices) steps.push(...(choice.spec_trace || []));
    const many = drawTrees(steps);
    say("trees-note", many ? `${steps.length} steps, ${sum(steps.map((step) => step.tokens.length))} tokens; the last ${Math.min(DRAWN, many)} with drafts are drawn` : "nothing was drafted: there is no tree to draw");
  } catch (error) {
    say("trees-note", error instanceof TypeError ? "The server does not answer." : error.message);
  } finally {
    $("trees-send").disabled = false;
  }
}

$("trees-form").addEventListener("submit", (event) => { event.preventDefault(); trees(); });
