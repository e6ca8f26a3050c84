"use strict";
// What comes from the server or a model is written as text, never as markup.
const $ = (id) => document.getElementById(id);

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}
// Pictures of buttons, which have their names in aria-label: strokes on a field of 24 × 24.
const ICONS = {
  menu: "M4 6h16M4 12h16M4 18h10", close: "M6 6l12 12M18 6L6 18", send: "M12 19V5M6 11l6-6 6 6", attach: "M20 11.5l-8.2 8.2a5 5 0 01-7.1-7.1l8.6-8.6a3.4 3.4 0 014.8 4.8l-8.6 8.6a1.7 1.7 0 01-2.4-2.4l7.9-7.9",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4", down: "M12 5v14M6 13l6 6 6-6", rename: "M4 20h4L19 9l-4-4L4 16z", remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  keys: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8", system: "M4 5h16v11H4zM9 20h6M12 16v4", light: "M12 8a4 4 0 100 8 4 4 0 000-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  dark: "M20 14.5A8.5 8.5 0 119.5 4a7 7 0 0010.5 10.5z", plus: "M12 5v14M5 12h14", file: "M7 3h7l4 4v14H7zM14 3v4h4",
};
function icon(name) {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  picture.setAttribute("viewBox", "0 0 24 24");
  picture.setAttribute("aria-hidden", "true");
  picture.classList.add("icon-picture");
  path.setAttribute("d", ICONS[name]);
  picture.append(path);
  return picture;
}
function say(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }
// Browsers have a clipboard where the page came by HTTPS or from this machine; elsewhere what is selected can be copied.
async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); } catch {
    const field = make("textarea"), dialog = button.closest("dialog") || document.body;
    field.value = text;
    dialog.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  const name = button.dataset.name ??= button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = name; }, 1500);
}

// What outlives the tab. A browser may refuse to keep anything: then it is forgotten.
function stored(name) { try { return localStorage.getItem("mtpserve-" + name); } catch { return null; } }
function store(name, value) { try { localStorage.setItem("mtpserve-" + name, value); } catch { /* refused, or full */ } }

// The system's colours, or those that were chosen here, in every tab.
const THEMES = ["system", "light", "dark"];
function theme() { return THEMES.includes(stored("theme")) ? stored("theme") : "system"; }
function showTheme() {
  document.documentElement.dataset.theme = theme();
  const button = $("theme");
  if (!button) return;
  button.replaceChildren(icon(theme()));
  button.title = `Colours: ${theme()}`;
  button.setAttribute("aria-label", button.title);
}
showTheme();
window.addEventListener("storage", (event) => { if (event.key === "mtpserve-theme") showTheme(); });
$("theme")?.addEventListener("click", () => { store("theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]); showTheme(); });

// The server, or a gateway before it, may ask for a key: the form appears when it does.
const KEY = "mtpserve-key";
const key = () => sessionStorage.getItem(KEY) || "";
async function ask(path, options) {
  const used = key(), headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401 && used === key()) {
    if ($("key-form").hidden) { $("key-form").hidden = false; $("key").focus(); }
    say("key-note", used ? "The server refuses this key." : "");
  }
  return answer;
}
async function reason(answer) {
  try { return (await answer.json()).error.message; } catch { return `HTTP ${answer.status}`; }
}
// A key that somebody types in is kept, and what needs it is asked `again`.
function withKey(again) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value.trim());
    $("key-form").hidden = true;
    $("key").value = "";
    again();
  });
}
