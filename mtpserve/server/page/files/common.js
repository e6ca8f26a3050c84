const WINDOW_S = 10, TIMEOUT_MS = 5000, RANKS = 8, STEPS = 16;
// The draft model's drafts have the colour of class mtp, whatever it is called.
const SOURCES = { mtp: "MTP layer", ngram: "n-gram", prediction: "prediction", grammar: "grammar" };
const DRAFTERS = { mtp: "MTP layer", eagle: "EAGLE", eagle3: "EAGLE-3", medusa: "Medusa", dflash: "DFlash", standalone: "draft model" };
const kind = (source) => source in SOURCES ? source : "mtp";
const called = (source) => DRAFTERS[source] || SOURCES[source] || source;
const TIERS = { host: "Host memory", disk: "Disk" };
const whole = (n) => Math.round(n).toLocaleString("en-US");
const percent = (part, all) => all > 0 ? (100 * part / all).toFixed(0) + " %" : "–";
let served = null;  // the last answer of /stats
const sum = (list) => list.reduce((a, b) => a + b, 0);

function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
// ------------------------------------------------------------------------------------------------------------ views

// Each tab is a view and a fragment of the address, so that links and the browser's buttons lead to it. No element has that id: focus would go there.
const ALL_TABS = [...document.querySelectorAll("[role=tab]")];
const tabs = () => ALL_TABS.filter((tab) => !tab.hidden);
function view(name) {
  for (const tab of ALL_TABS) {
    const chosen = tab.id === "tab-" + name;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen || (!name && tab === tabs()[0]) ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  document.body.dataset.view = name;
  $("wait-note").hidden = name !== "";
}
// A model without a chat template has no conversation: its first view is the text to continue. Which it is, only the server knows.
function route() {
  const name = location.hash.slice(1);
  if (!served && (name === "" || name === "talk")) return view("");
  view(tabs().some((tab) => tab.id === "tab-" + name) ? name : tabs()[0].id.replace("tab-", ""));
}
function suit(state) {
  $("tab-talk").hidden = !state.chat;
  $("model").title = state.model;
  $("about").hidden = !state.about;
  say("about-text", state.about);
  suitSettings(state);
  route();
  if (document.activeElement === document.body && !isNarrow()) $("message").focus();
}
for (const tab of ALL_TABS) {
  tab.addEventListener("click", () => { location.hash = tab.id.replace("tab-", ""); });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], shown = tabs(), last = shown.length - 1;
    const at = event.key === "Home" ? 0 : event.key === "End" ? last : step ? (shown.indexOf(tab) + step + shown.length) % shown.length : null;
    if (at === null) return;
    event.preventDefault();
    shown[at].focus();
    shown[at].click();
  });
}
window.addEventListener("hashchange", route);
route();

// -------------------------------------------------------------------------------------------------------- requests

withKey(() => poll());

// Server-sent events, until [DONE].
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith(":")) continue;  // a comment, which keeps a silent stream open
      const data = JSON.parse(part.replace(/^data: /, ""));
      if (data.error) throw new Error(data.error.message);
      yield data;
    }
  }
}
