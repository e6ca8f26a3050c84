
// ------------------------------------------------------------------------------------- conversations, kept in this browser

// {id, title, named, changed, turns}: `named` by a person, `changed` in milliseconds.
let talk = fresh();
let conversations = [];                                  // the newest first
const CURRENT = "mtpserve-conversation", SEARCH_FROM = 6, DAY_MS = 86_400_000, TITLE = 60;
const others = new BroadcastChannel("mtpserve-conversations");

function fresh() { return { id: crypto.randomUUID?.() || `${Date.now()} ${Math.random()}`, title: "", named: false, changed: 0, turns: [] }; }

// The browser's database. One that gives none, as in some private windows, keeps nothing.
const database = new Promise((done) => {
  let request = null;
  try { request = indexedDB.open("mtpserve", 1); } catch { return done(null); }
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onsuccess = () => done(request.result);
  request.onerror = () => done(null);
});
async function within(mode, work) {
  const open = await database;
  if (!open) return null;
  return new Promise((done) => {
    const change = open.transaction("conversations", mode), request = work(change.objectStore("conversations"));
    change.oncomplete = () => done(request.result);
    change.onerror = change.onabort = () => done(null);
  });
}

function titleOf(turns) {
  const first = turns.find((turn) => turn.role === "user"), text = (first?.content || first?.files?.[0]?.name || "").trim().split("\n")[0];
  return text.length > TITLE ? text.slice(0, TITLE - 1) + "…" : text;
}

// Traces are left out: they are larger than all of the text.
async function keep(one = talk) {
  if (!one.turns.length || DELETED.has(one.id)) return;
  if (!one.named) one.title = titleOf(one.turns);
  one.changed = Date.now();
  if (one === talk) mark();
  const lasting = { ...one, turns: one.turns.map(({ trace, flipped, ...turn }) => turn) };
  conversations = [lasting, ...conversations.filter((each) => each.id !== one.id)];
  drawHistory();
  if (await within("readwrite", (store) => store.put(lasting)) === null) say("history-empty", "This browser keeps no conversations: they end with the tab.");
  others.postMessage("changed");
}

async function change(one, what) {
  Object.assign(one, what);
  if (one.id === talk.id) Object.assign(talk, what);
  drawHistory();
  await within("readwrite", (store) => store.put(one));
  others.postMessage("changed");
}

// An answer that still comes to a conversation that is deleted does not bring it back.
const DELETED = new Set();
async function remove(gone, text) {
  const before = conversations, at = conversations.indexOf(gone[0]);
  for (const one of gone) DELETED.add(one.id);
  conversations = conversations.filter((each) => !gone.includes(each));
  if (DELETED.has(talk.id)) begin(fresh());
  drawHistory();
  say("undo-text", text);
  $("history-undo").hidden = false;
  $("undo").onclick = async () => {
    $("history-undo").hidden = true;
    for (const one of gone) DELETED.delete(one.id);
    conversations = [...conversations.filter((each) => !before.some((one) => one.id === each.id)), ...before.filter((each) => !DELETED.has(each.id))];
    drawHistory();
    $("talk-new").focus();
    for (const one of gone) await within("readwrite", (store) => store.put(one));
    others.postMessage("changed");
  };
  (document.querySelectorAll("#history-list .entry")[at] || $("talk-new")).focus();
  for (const one of gone) await within("readwrite", (store) => store.delete(one.id));
  others.postMessage("changed");
}

async function loadConversations() {
  const all = await within("readonly", (store) => store.getAll());
  if (all) conversations = all.sort((a, b) => b.changed - a.changed);
  drawHistory();
}

// This tab shows it again after it is loaded again; a new tab begins a new one.
function mark() { try { sessionStorage.setItem(CURRENT, talk.id); } catch { /* the next load begins anew */ } }

// What is shown from now on. An answer that is still coming to another one stops.
function begin(one) {
  talking?.abort();
  talk = one;
  turns = one.turns;
  mark();
  say("context-note", "");
  draw();
  drawHistory();
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function group(changed) {
  const today = new Date().setHours(0, 0, 0, 0);
  return changed >= today ? "Today" : changed >= today - DAY_MS ? "Yesterday" : changed >= today - 7 * DAY_MS ? "Last 7 days" : "Older";
}

function iconButton(name, label, does) {
  const button = make("button", undefined, "icon");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.title = label;
  button.append(icon(name));
  button.addEventListener("click", does);
  return button;
}

function renaming(one, item) {
  const form = make("form"), field = make("input");
  field.value = one.title;
  field.required = true;
  field.maxLength = 200;
  field.setAttribute("aria-label", "Name of the conversation");
  const leave = () => { drawHistory(); [...$("history-list").querySelectorAll("li")].find((each) => each.dataset.id === one.id)?.querySelector(".entry").focus(); };
  field.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); leave(); } });
  form.addEventListener("submit", (event) => { event.preventDefault(); change(one, { title: field.value.trim() || one.title, named: true }); leave(); });
  field.addEventListener("blur", () => { if (form.isConnected && field.value.trim() && field.value !== one.title) change(one, { title: field.value.trim(), named: true }); });
  form.append(field);
  item.replaceChildren(form);
  field.select();
}

function entry(one) {
  const item = make("li"), button = make("button", one.title || "Without a title", "entry");
  item.dataset.id = one.id;
  button.type = "button";
  button.title = one.title;
  if (one.id === talk.id) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => { begin(structuredClone(one)); if (isNarrow()) openPanel("history", false); $("message").focus(); });
  item.append(button, iconButton("rename", `Rename ${one.title}`, () => renaming(one, item)), iconButton("remove", `Delete ${one.title}`, () => remove([one], `“${one.title}” was deleted.`)));
  return item;
}

function drawHistory() {
  const wanted = $("history-search").value.trim().toLowerCase(), parts = [];
  const shown = conversations.filter((one) => !wanted || [one.title, ...one.turns.map((turn) => turn.content)].some((text) => text.toLowerCase().includes(wanted)));
  for (const one of shown) {
    if (parts.at(-1)?.title !== group(one.changed)) parts.push({ title: group(one.changed), items: [] });
    parts.at(-1).items.push(entry(one));
  }
  $("history-list").replaceChildren(...parts.flatMap(({ title, items }) => { const list = make("ul"); list.setAttribute("aria-label", title); list.append(...items); return [make("h3", title), list]; }));
  if (wanted && !shown.length) $("history-list").replaceChildren(make("p", "Nothing is found.", "note"));
  $("search-row").hidden = conversations.length < SEARCH_FROM && !wanted;
  $("history-clear").hidden = conversations.length < 2;
  say("talk-title", talk.title || "New conversation");
}

$("history-search").addEventListener("input", drawHistory);
$("talk-new").prepend(icon("plus"));
$("talk-new").addEventListener("click", () => { begin(fresh()); if (isNarrow()) openPanel("history", false); $("message").focus(); });
$("history-clear").addEventListener("click", () => remove(conversations, `${conversations.length} conversations were deleted.`));
others.addEventListener("message", loadConversations);
