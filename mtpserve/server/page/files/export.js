
// ------------------------------------------------------------------------------------- a request as curl and as Python

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const BASE = location.origin + location.pathname.replace(/[^/]*$/, "");

function curl(path, asked) {
  const secret = key() ? ' \\\n  -H "Authorization: Bearer $MTPSERVE_API_KEY"' : "";
  return `curl --no-buffer ${quoted(BASE + path)} \\\n  -H 'Content-Type: application/json'${secret} \\\n  -d ${quoted(JSON.stringify(asked, null, 2))}`;
}

// JSON's strings and numbers are Python's, too.
function literal(value, indent) {
  const next = indent + "    ";
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const items = Array.isArray(value) ? value.map((each) => literal(each, next)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, next)}`);
  return items.length ? `${open}\n${next}${items.join(`,\n${next}`)},\n${indent}${close}` : open + close;
}

// What OpenAI's library has no argument for.
const EXTRA = new Set(["top_k", "min_p"]);
// What only this page reads: where the tokens came from, and how many there were.
const PAGES_OWN = ["return_spec_trace", "stream_options"];

function python(asked) {
  const known = Object.entries(asked).filter(([name]) => !EXTRA.has(name)), extra = Object.fromEntries(Object.entries(asked).filter(([name]) => EXTRA.has(name)));
  const lines = [...known.map(([name, value]) => `    ${name}=${literal(value, "    ")},`), ...(Object.keys(extra).length ? [`    extra_body=${literal(extra, "    ")},`] : [])];
  return `${key() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(BASE + "v1")}, api_key=${key() ? 'os.environ["MTPSERVE_API_KEY"]' : '"none"'})
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
`;
}

function exported(request) {
  const asked = Object.fromEntries(Object.entries(request).filter(([name]) => !PAGES_OWN.includes(name)));
  $("export-curl").replaceChildren(codeBlock(curl("v1/chat/completions", asked), "shell"));
  $("export-python").replaceChildren(codeBlock(python(asked), "python"));
  $("export").showModal();
}
$("export-close").addEventListener("click", () => $("export").close());
