
// -------------------------------------------------------------------------------------------------- requests now

const ADMIN = "mtpserve-admin-key", SHOWN = 50;
let ending = null;  // the request whose end waits for the admin's key

async function live(several) {
  const answer = await ask("stats/requests", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) return;
  const { total, requests } = await answer.json(), list = $("live"), there = new Map([...list.children].map((item) => [item.dataset.key, item]));
  requests.slice(0, SHOWN).forEach((one, i) => {
    const key = `${one.id} ${one.choice}`, item = there.get(key) || listed(one, key);
    there.delete(key);
    const [head, facts] = about(one, several > 1);
    item.querySelector(".state").textContent = head;
    item.querySelector(".note").textContent = facts;
    if (list.children[i] !== item) list.insertBefore(item, list.children[i] || null);
  });
  for (const item of there.values()) {
    if (item.contains(document.activeElement)) $("live-title").focus();
    item.remove();
  }
  $("live-empty").hidden = total > 0;
  say("live-title", total > 0 ? `Requests now: ${whole(total)}` + (total > SHOWN ? `, the oldest ${SHOWN} of them here` : "") : "Requests now");
}

function about(one, several) {
  const head = [one.state === "waiting" ? "waits for its first token" : "running", one.route, ...(several ? [`engine ${one.engine}`] : []), one.age_s < 1 ? "for less than 1 s" : `for ${lasting(Math.round(one.age_s))}`];
  const facts = [`${whole(one.prompt_tokens)} prompt tokens` + (one.cached_tokens ? `, ${whole(one.cached_tokens)} of them cached` : ""), `${whole(one.output_tokens)} written`];
  if (one.verifications) facts.push(`${(1 + one.accepted_tokens / one.verifications).toFixed(2)} tokens per step, ${percent(one.accepted_tokens, one.draft_tokens)} of ${whole(one.draft_tokens)} drafts accepted`);
  return [head.filter(Boolean).join(" · "), facts.join(" · ")];
}

// What stays of it: elements that are not made anew keep the focus.
function listed(one, key) {
  const item = make("li"), text = make("div"), button = make("button", "Abort");
  item.dataset.key = key;
  text.append(make("span", one.id + (one.choice ? `, choice ${one.choice}` : ""), "id"), make("span", "", "state"), make("div", "", "note"));
  button.type = "button";
  button.setAttribute("aria-label", `Abort request ${one.id}`);
  button.addEventListener("click", () => end(one.id));
  item.append(text, button);
  return item;
}

// All choices of the request. The admin's key, once given, is used for this alone.
async function end(id) {
  const admin = sessionStorage.getItem(ADMIN), options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ rid: id }) };
  try {
    const answer = admin ? await fetch("abort_request", { ...options, headers: { ...options.headers, Authorization: `Bearer ${admin}` } }) : await ask("abort_request", options);
    if (answer.status === 403 || (admin && answer.status === 401)) {
      ending = id;
      sessionStorage.removeItem(ADMIN);
      $("admin-form").hidden = false;
      say("admin-note", admin ? "The server refuses this key." : "");
      $("admin-key").focus();
    } else if (answer.ok) say("live-note", (await answer.json()).aborted ? `${id} was ended.` : `${id} had ended already.`);
    else say("live-note", await reason(answer));
  } catch { say("live-note", "The server does not answer."); }
}

$("admin-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(ADMIN, $("admin-key").value.trim());
  $("admin-form").hidden = true;
  $("admin-key").value = "";
  $("live-title").focus();
  end(ending);
});
