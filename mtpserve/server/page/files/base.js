"use strict";
// What comes from the server or a model is written as text, never as markup.
const $ = (id) => document.getElementById(id);

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
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
