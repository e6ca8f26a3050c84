
// ---------------------------------------------------------------------------------------------------------- Markdown

// Text of a model as nodes: whatever is not known here stays text. Repetitions are bounded, so that no text takes long.
const FENCE = /^ {0,3}(```+|~~~+) *([^`]*)$/, HEADING = /^ {0,3}(#{1,6}) +(.*?)(?: +#+)? *$/, RULE = /^ {0,3}(?:[-*_] *){3,}$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/, DIVIDER = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const INLINE = new RegExp([
  "\\\\([!-/:-@[-`{-~])",                                                      // 1: an escaped sign
  "(`{1,3})([^`](?:[^\\n]{0,2000}?[^`])?)\\2(?!`)",                            // 3: code
  "\\*\\*(?=\\S)([^\\n]{0,2000}?\\S)\\*\\*(?!\\*)|\\b__(?=\\S)([^\\n]{0,2000}?\\S)__\\b",  // 4, 5: strong
  "\\*(?=[^\\s*])([^*\\n]{0,2000}?[^\\s*])\\*|\\b_(?=[^\\s_])([^_\\n]{0,2000}?[^\\s_])_\\b",  // 6, 7: emphasised
  "~~(?=\\S)([^\\n]{0,2000}?\\S)~~",                                           // 8: struck out
  "!?\\[([^\\]\\n]{0,500})\\]\\(([^)\\s]{1,2000})(?: +\"[^\"\\n]{0,300}\")?\\)",  // 9, 10: a link, or what would be a picture
  "<?(https?://[^\\s<>\"'`)\\]]{1,2000})>?",                                   // 11: an address
].join("|"), "g");

function link(text, address) {
  let url = null;
  try { url = new URL(address); } catch { /* stays text */ }
  if (!url || !["http:", "https:"].includes(url.protocol)) return null;
  const made = make("a");
  made.href = url.href;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  made.append(...text);
  return made;
}

function inline(text, depth = 0) {
  if (depth > 8) return [text];
  const made = [], inside = (tag, content) => { const node = make(tag); node.append(...inline(content, depth + 1)); return node; };
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    const [all, escaped, , code, bold, bold2, soft, soft2, struck, label, target, address] = found;
    made.push(text.slice(from, found.index));
    from = found.index + all.length;
    if (escaped) made.push(escaped);
    else if (code !== undefined) made.push(make("code", code.trim() || code));
    else if (bold || bold2) made.push(inside("strong", bold || bold2));
    else if (soft || soft2) made.push(inside("em", soft || soft2));
    else if (struck) made.push(inside("s", struck));
    else if (target) made.push(link(inline(label || target, depth + 1), target) || all);
    else {
      const end = address.match(/[.,;:!?]*$/)[0], url = address.slice(0, address.length - end.length);  // of the sentence, not of the address
      made.push(link([url], url) || url, end);
    }
  }
  made.push(text.slice(from));
  return made.filter((node) => node !== "");
}

function copyButton(text, name = "Copy") {
  const button = make("button", name, "small");
  button.type = "button";
  button.addEventListener("click", () => copy(text(), button));
  return button;
}

// The library's words for parts of a program become classes; it writes into nodes here, and no markup.
const COLOURED = 40_000;                                 // characters; longer code stays plain, or typing would wait
class Coloured {
  constructor() { this.root = document.createDocumentFragment(); this.open = [this.root]; }
  addText(text) { if (text) this.open.at(-1).append(text); }
  startScope(name) {
    const node = make("span", undefined, "h-" + String(name).split(".")[0]);
    this.open.at(-1).append(node);
    this.open.push(node);
  }
  endScope() { this.open.pop(); }
  openNode(name) { this.startScope(name); }
  closeNode() { this.endScope(); }
  __addSublanguage(inner) { this.open.at(-1).append(inner.root); }
  finalize() { this.open = [this.root]; }
  toHTML() { return ""; }
}
hljs.configure({ __emitter: Coloured });
hljs.registerAliases(["ts", "tsx", "typescript"], { languageName: "javascript" });
hljs.registerAliases(["c", "h"], { languageName: "cpp" });
hljs.registerAliases(["shell", "console"], { languageName: "bash" });
function coloured(text, language) {
  if (!language || text.length > COLOURED || !hljs.getLanguage(language)) return text;
  return hljs.highlight(text, { language, ignoreIllegals: true })._emitter.root;
}

// Code that still grows is not coloured yet.
function codeBlock(text, language, grows = false) {
  const made = make("figure", undefined, "code"), head = make("figcaption", language || "text"), pre = make("pre"), code = make("code");
  code.append(grows ? text : coloured(text, language.toLowerCase()));
  pre.append(code);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", `Code, ${language || "text"}`);
  head.append(copyButton(() => text, "Copy code"));
  made.append(head, pre);
  return made;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function dataTable(head, divider, rows) {
  const sides = cells(divider).map((mark) => mark.endsWith(":") ? (mark.startsWith(":") ? "middle" : "end") : "");
  const line = (tag, texts) => {
    const made = make("tr");
    made.append(...texts.slice(0, sides.length).map((text, i) => { const cell = make(tag, undefined, sides[i]); cell.append(...inline(text)); return cell; }));
    return made;
  };
  const box = make("div", undefined, "wide"), made = make("table"), top = make("thead"), body = make("tbody");
  top.append(line("th", cells(head)));
  body.append(...rows.map((row) => line("td", cells(row))));
  made.append(top, body);
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  box.append(made);
  return box;
}

// The items of one list, and in each of them all lines that are indented deeper than its sign.
function list(lines, depth) {
  const [, indent, sign] = lines[0].match(ITEM), ordered = /\d/.test(sign), made = make(ordered ? "ol" : "ul"), items = [];
  if (ordered && parseInt(sign) !== 1) made.start = parseInt(sign);
  let used = 0;
  for (const line of lines) {
    const found = line.match(ITEM), shift = line.match(/^ */)[0].length;
    if (found && shift <= indent.length + 1) {
      if (/\d/.test(found[2]) !== ordered || shift < indent.length) break;
      items.push({ at: line.length - found[3].length, lines: [found[3]] });
    } else if (line.trim() === "" || shift > indent.length) items.at(-1).lines.push(line.slice(Math.min(shift, items.at(-1).at)));
    else break;
    used += 1;
  }
  for (const item of items) {
    const node = make("li"), loose = item.lines.slice(0, -1).some((line) => line.trim() === ""), inside = blocks(item.lines, depth + 1);
    for (const block of inside) node.append(...(block.tagName === "P" && !loose ? block.childNodes : [block]));
    made.append(node);
  }
  return [made, used];
}

function block(lines, at, depth) {
  const line = lines[at], fence = line.match(FENCE), heading = line.match(HEADING);
  if (fence) {
    let end = at + 1;
    while (end < lines.length && !(lines[end].trim().startsWith(fence[1]) && /^ {0,3}[`~]+ *$/.test(lines[end]))) end += 1;
    return [codeBlock(lines.slice(at + 1, end).join("\n"), fence[2].trim().split(" ")[0], growing && end >= lines.length), end + 1];
  }
  if (heading) {
    const made = make("h" + Math.min(6, heading[1].length + 2));  // the page's own headings are above
    made.append(...inline(heading[2]));
    return [made, at + 1];
  }
  if (RULE.test(line)) return [make("hr"), at + 1];
  if (QUOTE.test(line) && depth < 8) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const made = make("blockquote");
    made.append(...blocks(lines.slice(at, end).map((each) => each.replace(QUOTE, "")), depth + 1));
    return [made, end];
  }
  if (ITEM.test(line) && depth < 8) {
    const [made, used] = list(lines.slice(at), depth);
    return [made, at + used];
  }
  if (line.includes("|") && DIVIDER.test(lines[at + 1] || "") && lines[at + 1].includes("-") && cells(line).length === cells(lines[at + 1]).length) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return [dataTable(line, lines[at + 1], lines.slice(at + 2, end)), end];
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && ![FENCE, HEADING, RULE, QUOTE].some((sign) => sign.test(lines[end])) && !/^ {0,3}([-*+]|1[.)]) +\S/.test(lines[end])) end += 1;
  const made = make("p");
  lines.slice(at, end).forEach((each, i) => made.append(...(i > 0 ? [make("br")] : []), ...inline(each.trim())));
  return [made, end];
}

function blocks(lines, depth = 0) { return parsed(lines, 0, depth).map(([node]) => node); }

// Nodes, each with the line that it begins at.
function parsed(lines, from, depth) {
  const found = [];
  for (let at = from; at < lines.length;) {
    if (lines[at].trim() === "") { at += 1; continue; }
    const [node, next] = block(lines, at, depth);
    found.push([node, at]);
    at = next;
  }
  return found;
}

const linesOf = (text) => text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
const markdown = (text) => blocks(linesOf(text));

// Draws a text that may have grown since. Only its last two blocks can differ then: a line that was not complete may belong to the one before it.
const DRAWN_TEXTS = new WeakMap();                       // box → its text, and its blocks with the lines that they begin at
let growing = false;
function drawMarkdown(box, text, grows) {
  const before = DRAWN_TEXTS.get(box);
  if (before?.text === text && before.grows === grows) return;
  const same = before && text.startsWith(before.text) ? before.blocks.slice(0, -2) : [];
  growing = grows;
  const more = parsed(linesOf(text), same.length ? before.blocks[same.length][1] : 0, 0);
  growing = false;
  while (box.childNodes.length > same.length) box.lastChild.remove();
  box.append(...more.map(([node]) => node));
  DRAWN_TEXTS.set(box, { text, grows, blocks: [...same, ...more] });
}
