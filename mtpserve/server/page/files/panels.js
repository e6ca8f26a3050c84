
// ------------------------------------------------------------- the panels beside a conversation, and what keys do

// Beside the conversation where there is room; on narrow screens over it, one at a time.
const PANELS = ["history", "settings"], NARROW_SCREEN = window.matchMedia("(max-width: 860px)");
const isNarrow = () => NARROW_SCREEN.matches;

function openPanel(name, open) {
  if (open && isNarrow()) for (const other of PANELS) if (other !== name) showPanel(other, false);
  showPanel(name, open);
  if (!isNarrow()) store("panel-" + name, open);
}
function showPanel(name, open) {
  $(name).hidden = !open;
  $(name + "-open").setAttribute("aria-expanded", open);
  $("shade").hidden = !isNarrow() || PANELS.every((each) => $(each).hidden);
}
function suitPanels() {
  for (const name of PANELS) showPanel(name, !isNarrow() && (stored("panel-" + name) ?? String(name === "history")) === "true");
}
for (const name of PANELS) {
  $(name + "-open").append(icon(name === "history" ? "menu" : "settings"));
  $(name + "-close").append(icon("close"));
  $(name + "-open").addEventListener("click", () => {
    openPanel(name, $(name).hidden);
    if (!$(name).hidden && isNarrow()) $(name + "-close").focus();
  });
  $(name + "-close").addEventListener("click", () => { openPanel(name, false); $(name + "-open").focus(); });
}
$("shade").addEventListener("click", () => { for (const name of PANELS) showPanel(name, false); });
NARROW_SCREEN.addEventListener("change", suitPanels);

// [keys, what they do, when pressed]: with the keys Control or, on a Mac, Command.
const MAC = /Mac|iPhone|iPad/.test(navigator.platform), CONTROL = MAC ? "⌘" : "Ctrl";
const KEYS = [
  [["Enter"], "Send the message"],
  [["Shift", "Enter"], "Begin a new line"],
  [["Esc"], "Stop the answer, or close a panel"],
  [["↑"], "Edit your last message, from an empty field"],
  [["Shift", "Esc"], "Go to the message"],
  [[CONTROL, "Shift", "O"], "New conversation"],
  [[CONTROL, "Shift", "S"], "Show or hide the list of conversations"],
  [[CONTROL, ","], "Show or hide the settings"],
  [[CONTROL, "/"], "Show this help"],
  [["←", "→"], "Go to another view, from its tab"],
];
$("help-keys").append(...KEYS.flatMap(([keys, text]) => {
  const term = make("dt");
  term.append(...keys.map((name) => make("kbd", name)));
  return [term, make("dd", text)];
}));
$("help-open").append(icon("keys"));
$("help-open").addEventListener("click", () => $("help").showModal());
$("help-close").addEventListener("click", () => $("help").close());

function onKey(event) {
  const control = MAC ? event.metaKey : event.ctrlKey, letter = event.key.toLowerCase(), talks = !$("view-talk").hidden;
  if (control && event.key === "/") { if ($("help").open) $("help").close(); else $("help").showModal(); }
  else if (!talks || document.querySelector("dialog[open]")) return;
  else if (event.key === "Escape" && event.shiftKey) $("message").focus();
  else if (event.key === "Escape" && talking) talking.abort();
  else if (event.key === "Escape" && isNarrow() && !$("shade").hidden) {
    const name = PANELS.find((each) => !$(each).hidden);
    openPanel(name, false);
    $(name + "-open").focus();
  } else if (control && event.shiftKey && letter === "o") $("talk-new").click();
  else if (control && event.shiftKey && letter === "s") openPanel("history", $("history").hidden);
  else if (control && event.key === ",") openPanel("settings", $("settings").hidden);
  else return;
  event.preventDefault();
}
document.addEventListener("keydown", onKey);
suitPanels();
