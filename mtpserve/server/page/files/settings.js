
// ----------------------------------------------------------------------------------------------------------- settings

// They are this browser's, for all conversations. An empty field is not sent, and the model's value applies.
const NUMBERS = {
  temperature: "talk-temperature", top_p: "talk-top-p", top_k: "talk-top-k", min_p: "talk-min-p", presence_penalty: "talk-presence-penalty",
  frequency_penalty: "talk-frequency-penalty", max_tokens: "talk-max-tokens", seed: "talk-seed",
};
// Who names the values of a chat that names none. The last two do not fill what a request leaves out once it names a part: then all are sent.
const SAMPLING_SOURCES = { checkpoint: "the checkpoint's", raw: "the model's own distribution", "model card": "the model card's", mtpserve: "mtpserve's for chats" };
const LAW = ["temperature", "top_p", "top_k", "min_p"], OWN_LAW = ["model card", "mtpserve"];
const MAX_TOKENS = "2048", SETTING_FIELDS = [...Object.values(NUMBERS), "system", "tools", "tool-choice"];

function keepSettings() {
  const values = Object.fromEntries(SETTING_FIELDS.map((id) => [id, $(id).value]));
  store("settings", JSON.stringify({ ...values, "show-tokens": $("show-tokens").checked }));
  summarise();
}

function loadSettings() {
  let values = {};
  try { values = JSON.parse(stored("settings")) || {}; } catch { /* from another version */ }
  $("talk-max-tokens").value = MAX_TOKENS;
  for (const id of SETTING_FIELDS) if (typeof values[id] === "string") $(id).value = values[id];
  $("show-tokens").checked = values["show-tokens"] === true;
}

function applying(name) {
  const typed = $(NUMBERS[name]).value;
  return typed === "" ? served.default_sampling[name] : Number(typed);
}

// What the answers are drawn with, below the message.
function summarise() {
  if (!served) return;
  const temperature = applying("temperature"), parts = temperature === 0 ? ["temperature 0: always the likeliest token"] : [`temperature ${temperature}`];
  if (temperature > 0) {
    if (applying("top_p") < 1) parts.push(`top-p ${applying("top_p")}`);
    if (applying("top_k") > 0) parts.push(`top-k ${applying("top_k")}`);
    if (applying("min_p") > 0) parts.push(`min-p ${applying("min_p")}`);
  }
  say("sampling-note", parts.join(" · "));
}

// The values that apply stand in the empty fields.
function suitSettings(state) {
  const none = { presence_penalty: 0, frequency_penalty: 0 }, values = { ...none, ...state.default_sampling };
  for (const [name, id] of Object.entries(NUMBERS)) if (values[name] !== undefined) $(id).placeholder = values[name];
  $("talk-max-tokens").placeholder = `${whole(state.context_length)}: the context`;
  say("defaults-note", `An empty field uses the value in grey: ${SAMPLING_SOURCES[state.default_sampling.source]}. This browser keeps the settings.`);
  say("hello", `Talk to ${state.model}`);
  summarise();
}

function fail(id, details, text) {
  openPanel("settings", true);
  if (details) $(details).open = true;
  say(id + "-note", text);
  $(id).focus();
  return null;
}

// What is sent beside the messages; null: a field is wrong, and says so.
function options() {
  const asked = { model: served?.model || "", stream: true, stream_options: { include_usage: true }, return_spec_trace: true };
  for (const [name, id] of Object.entries(NUMBERS)) {
    if (!$(id).checkValidity()) { openPanel("settings", true); $(id).reportValidity(); return null; }
    if ($(id).value !== "") asked[name] = Number($(id).value);
  }
  if (OWN_LAW.includes(served?.default_sampling.source) && LAW.some((name) => name in asked)) for (const name of LAW) asked[name] = applying(name);
  say("tools-note", "");
  if ($("tools").value.trim()) {
    try {
      asked.tools = JSON.parse($("tools").value);
      if (!Array.isArray(asked.tools)) throw new Error("this is not a list");
    } catch (error) {
      return fail("tools", "tools-details", `Tools: ${error.message}`);
    }
    asked.tool_choice = $("tool-choice").value;
  }
  return asked;
}

for (const id of SETTING_FIELDS) $(id).addEventListener("input", keepSettings);
$("settings-reset").addEventListener("click", () => {
  for (const id of SETTING_FIELDS) if (id !== "tool-choice") $(id).value = "";
  $("tool-choice").value = "auto";
  $("talk-max-tokens").value = MAX_TOKENS;
  keepSettings();
});
loadSettings();
