
// ------------------------------------------------------------------------------- tokens in the colour of their source

function token(text, name, title) {
  const made = make("span", undefined, name);
  // A sign that is drawn, not written, shows where a token breaks the line: what is copied is the text.
  text.split("\n").forEach((part, i) => made.append(...(i > 0 ? [make("span", "", "break"), "\n"] : []), part));
  made.title = title;
  return made;
}

// The drafts, one below the other, that were not what the model wrote after `parent`.
function rejected(nodes, parent) {
  const found = [];
  for (let next; (next = nodes.find((draft) => draft.parent === parent && !draft.accepted)); parent = next.node) found.push(next);
  return found;
}

// One step: drafts that were accepted, in order, then the model's own token. Those that were rejected are marked before it, outside of the text.
function painted(step, number, tally) {
  const nodes = step.proposed.map((draft, i) => ({ ...draft, node: i + 1 })), accepted = nodes.filter((draft) => draft.accepted);
  const missed = rejected(nodes, accepted.length ? accepted.at(-1).node : 0);
  return step.tokens.map((id, i) => {
    const draft = accepted[i], name = draft ? `t drafted ${kind(draft.source)} d${Math.min(7, i + 1)}` : "t own";
    tally.set(name, (tally.get(name) || 0) + 1);
    if (draft) return token(step.texts[i], name, `step ${number}: draft, depth ${i + 1}, from ${called(draft.source)}`);
    const made = token(step.texts[i], name, `step ${number}: the model's own`);
    if (missed.length) {
      made.dataset.instead = "";
      made.title += `, instead of ${JSON.stringify(missed.map((each) => each.text).join(""))} from ${called(missed[0].source)}`;
    }
    return made;
  });
}

// What was proposed and not written: its step, by whom, the drafts, and the model's own token.
function misses(step, number) {
  const nodes = step.proposed.map((draft, i) => ({ ...draft, node: i + 1 })), accepted = nodes.filter((draft) => draft.accepted);
  const missed = accepted.length < step.tokens.length ? rejected(nodes, accepted.length ? accepted.at(-1).node : 0) : [];
  if (!missed.length) return [];
  const shown = (text) => text.replaceAll("\n", "\u23CE"), made = make("tr"), first = make("th", String(number)), drafts = make("td"), own = make("td");
  first.scope = "row";
  drafts.append(make("del", shown(missed.map((each) => each.text).join(""))));
  own.append(make("code", shown(step.texts[accepted.length])));
  made.append(first, make("td", called(missed[0].source)), drafts, own);
  return [made];
}

function legendOf(box, tally) {
  const items = [["t own", "the model's own"], ...Object.entries(SOURCES).flatMap(([source, name]) =>
    [1, 2, 3, 4, 5, 6, 7].filter((depth) => tally.has(`t drafted ${source} d${depth}`) || expected(source, depth))
      .map((depth) => [`t drafted ${source} d${depth}`, `${name}, depth ${depth}${depth === 7 ? " and more" : ""}`]))];
  box.replaceChildren(...items.map(([name, text]) => {
    const item = make("li");
    item.append(make("span", "token", "sample " + name), " " + text + " ", make("b", tally.has(name) ? whole(tally.get(name)) : ""));
    return item;
  }));
}
