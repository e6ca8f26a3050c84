
// ------------------------------------------------------------------------------------- text files that go with a message

const FILE_BYTES = 4 << 20, PASTED = 4000;               // a longer text that is pasted becomes a file
let files = [];                                          // {name, text}

const size = (text) => text.length < 1000 ? `${text.length} characters` : `${whole(text.length / 1000)} k characters`;

// The text that the model reads: each file in a fence that is longer than any in it.
function withFiles(turn) {
  const parts = (turn.files || []).map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map((run) => run[0].length + 1))), ending = name.includes(".") ? name.split(".").at(-1) : "";
    return `${name}:\n${fence}${ending}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
  });
  return parts.join("") + turn.content;
}

function fileItem({ name, text }) {
  const item = make("li", undefined, "file");
  item.append(icon("file"), make("span", name, "file-name"), make("span", size(text), "note"));
  return item;
}

function drawFiles() {
  $("files").replaceChildren(...files.map((file) => {
    const item = fileItem(file), button = make("button", undefined, "icon");
    button.type = "button";
    button.setAttribute("aria-label", `Remove ${file.name}`);
    button.append(icon("close"));
    button.addEventListener("click", () => { files = files.filter((each) => each !== file); drawFiles(); $("message").focus(); });
    item.append(button);
    return item;
  }));
  $("message").required = files.length === 0;
}

async function textOf(file) {
  if (file.size > FILE_BYTES) throw new Error(`it has ${whole(file.size / 1024)} KiB, at most ${whole(FILE_BYTES / 1024)} can be attached`);
  let text = null;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()); } catch { /* said below */ }
  if (text === null || text.includes("\0")) throw new Error("only text files can be attached, and this is none");
  return text;
}

async function attach(list) {
  const faults = [];
  for (const file of list) {
    try { files.push({ name: file.name, text: await textOf(file) }); } catch (error) { faults.push(`${file.name}: ${error.message}.`); }
  }
  drawFiles();
  say("files-note", faults.join(" "));
  $("message").focus();
}

$("attach").append(icon("attach"));
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => { await attach([...$("file").files]); $("file").value = ""; });
$("message").addEventListener("paste", (event) => {
  const data = event.clipboardData, text = data.getData("text/plain");
  if (data.files.length) { event.preventDefault(); attach([...data.files]); }
  else if (text.length >= PASTED) {
    event.preventDefault();
    files.push({ name: `pasted ${files.length + 1}`, text });
    drawFiles();
  }
});
const carries = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
$("conversation").addEventListener("dragover", (event) => { if (carries(event)) { event.preventDefault(); $("drop").hidden = false; } });
$("conversation").addEventListener("dragleave", (event) => { if (!$("conversation").contains(event.relatedTarget)) $("drop").hidden = true; });
$("conversation").addEventListener("drop", (event) => {
  $("drop").hidden = true;
  if (!carries(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
