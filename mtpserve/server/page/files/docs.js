// From the server's OpenAPI document.
const JSON_TYPE = "application/json", REFUSED = "Known to other servers, and not supported here";

// Filled when it is first opened: schemas may contain themselves.
function folded(title, fill, name) {
  const box = make("details", undefined, name), summary = make("summary");
  summary.append(...[title].flat());
  box.append(summary);
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    const inside = make("div");
    inside.append(...fill());
    box.append(inside);
  });
  return box;
}

// Rows of cells, and what is folded below a row over the whole width; roles, because narrow screens show a table's cells below each other.
function table(names, rows) {
  const made = make("table"), head = make("thead"), body = make("tbody"), titles = make("tr");
  made.setAttribute("role", "table");
  for (const name of names) titles.append(Object.assign(make("th", name), { scope: "col" }));
  for (const cells of rows) {
    const row = make("tr");
    row.setAttribute("role", "row");
    cells.forEach((cell, at) => {
      const made = make("td");
      made.setAttribute("role", "cell");
      if (at > 1 && at < 4) made.dataset.name = names[at];
      made.append(...[cell].flat());
      row.append(made);
    });
    body.append(row);
    if (!cells.below?.length) continue;
    const wide = make("tr", undefined, "below"), cell = Object.assign(make("td"), { colSpan: names.length });
    wide.setAttribute("role", "row");
    cell.setAttribute("role", "cell");
    cell.append(...cells.below);
    wide.append(cell);
    body.append(wide);
  }
  head.append(titles);
  made.append(head, body);
  return made;
}

const shown = (value) => value === undefined || value === null ? [] : [make("code", JSON.stringify(value))];
const text = (words) => words ? [words] : [];
const nested = (schema) => objects(schema).map(([title, told]) => folded(make("code", title), () => content(told), "nested"));

function row(name, field, required) {
  const called = [make("code", name), ...(required ? [" ", make("span", "required", "required")] : [])];
  const cells = [called, typeOf(field), text(boundsOf(field)), shown(field.default), text(field.description)];
  return Object.assign(cells, { below: nested(field) });
}

const FIELDS = ["Field", "Type", "Bounds", "Default", "Meaning"];

// An object's fields, those first that it needs, and those apart that are only known to be refused.
function fields(schema) {
  const all = Object.entries(schema.properties), apart = all.filter(([, field]) => (field.description || "").startsWith(REFUSED));
  const required = new Set(schema.required), taken = all.filter((entry) => !apart.includes(entry));
  taken.sort(([one], [other]) => required.has(other) - required.has(one));
  const parts = taken.length ? [table(FIELDS, taken.map(([name, field]) => row(name, field, required.has(name))))] : [];
  if (apart.length) parts.push(folded(`${apart.length} fields of other servers that are refused`, () => [
    table(["Field", "Type", "Taken all the same"], apart.map(([name, field]) => [make("code", name), typeOf(field), text(boundsOf(field))])),
  ], "nested"));
  return parts;
}

function content(schema) {
  const told = named(schema), parts = told.description ? [make("p", told.description)] : [];
  if (told.properties && told.type) return [...parts, ...fields(told)];
  const inner = nested(told);
  if (inner.length === 1 && !parts.length) return content(objects(told)[0][1]);
  return [...parts, make("p", [typeOf(told), boundsOf(told)].filter(Boolean).join(", "), "note"), ...inner];
}

function bodyOf(schema) {
  const told = named(schema);
  return [
    make("h3", "Body"), make("p", "JSON. A field that is null is one that is not given.", "note"), ...content(schema),
    folded("Its schema, with the rules between fields", () => [make("pre", JSON.stringify(told, null, 2))], "nested"),
  ];
}

function answersOf(responses) {
  return Object.entries(responses).map(([status, answer]) => {
    const kinds = Object.keys(answer.content || {}), schema = answer.content?.[JSON_TYPE]?.schema;
    const title = [make("code", status), ` ${[answer.description === "Successful Response" ? "" : answer.description, ...kinds].filter(Boolean).join(", ")}`];
    if (schema) return folded(title, () => content(schema), "nested");
    const line = make("p");
    line.append(...title);
    return line;
  });
}

function details(method, path, told) {
  const more = told.description.slice(told.summary.length).replace(/^[.:;]\s*/, ""), schema = schemaOf(told);
  const parts = [...(more ? [make("p", told.description)] : []), ...trial(method, path, told)];
  if (told.parameters) parts.push(make("h3", "Parameters"), table(["Name", "Type", "Bounds", "Default", "Where"], told.parameters.map((each) => {
    const [called, type, bounds, value] = row(each.name, each.schema, each.required);
    return [called, type, bounds, value, `in the ${each.in}`];
  })));
  if (schema) parts.push(...bodyOf(schema));
  return [...parts, make("h3", "Answers"), ...answersOf(told.responses)];
}

// Words by which a route is found: its own, and the names of its fields.
function words(method, path, told) {
  const schema = schemaOf(told), names = (told.parameters || []).map((each) => each.name);
  for (const [, each] of schema ? objects(schema) : []) names.push(...Object.keys(each.properties));
  return [method, path, told.description, ...names].join(" ").toLowerCase();
}

const ROUTES = [];  // [box, words]

function route(method, path, told) {
  const title = [make("code", method.toUpperCase(), `method ${method}`), make("code", path, "path"), make("span", told.summary, "note")];
  const box = folded(title, () => details(method, path, told), "route");
  box.id = method + path;
  box.addEventListener("toggle", () => { if (box.open) history.replaceState(null, "", "#" + box.id); });
  ROUTES.push([box, words(method, path, told)]);
  return box;
}

function filter() {
  const wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const [box, known] of ROUTES) box.hidden = !wanted.every((word) => known.includes(word));
  for (const group of $("routes").children) group.hidden = !group.querySelector(".route:not([hidden])");
  const found = ROUTES.filter(([box]) => !box.hidden).length;
  say("found", wanted.length ? `${found} of ${ROUTES.length} routes` : `${ROUTES.length} routes`);
}

function linked() {
  const box = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!box?.classList.contains("route")) return;
  box.open = true;
  box.scrollIntoView();
}

function show(told) {
  const groups = new Map(told.tags.map((tag) => [tag.name, make("section")]));
  for (const [name, group] of groups) group.append(make("h2", name));
  schemas = told.components.schemas;
  ROUTES.length = 0;
  for (const [path, methods] of Object.entries(told.paths)) for (const [method, each] of Object.entries(methods)) {
    groups.get(each.tags[0]).append(route(method, path, each));
  }
  $("routes").replaceChildren(...groups.values());
  say("version", told.info.version);
  filter();
  linked();
}

async function load() {
  $("trouble").hidden = true;
  try {
    const answer = await ask("openapi.json", {});
    if (answer.status === 401) return;
    if (answer.status === 503) setTimeout(load, 1000);  // the model loads
    if (!answer.ok) throw new Error(await reason(answer));
    show(await answer.json());
    $("routes").setAttribute("aria-busy", "false");
  } catch (error) {
    say("trouble", `openapi.json cannot be read: ${error.message}`);
    $("trouble").hidden = false;
  }
}

$("filter").addEventListener("input", filter);
window.addEventListener("hashchange", linked);
withKey(() => { if (!ROUTES.length) load(); });  // requests that were being written stay
load();
