"""The page's race in a real browser: one prompt with drafts and without, measured, replayed and compared.

MTPSERVE_SCREENSHOTS=1 also writes docs/page-race-*.png and, of a replay in its own time, docs/page-race-*.gif.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.browsing import PHONE, ROOT, WIDE, Open, Running, never_ending, sound, wait_for

VERDICT = r"^[\d.]+ × the speed with drafts\. "


def race(page: Any, tokens: int = 48, verdict: str = VERDICT) -> list[dict[str, Any]]:
    """The requests that were sent, in their order, once the replay has ended."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "/v1/" in request.url and request.post_data else None)
    page.fill("#race-tokens", str(tokens))
    page.click("#race-start")
    wait_for(verdict, page, "#race-verdict")
    return sent


@pytest.mark.parametrize(("kind", "how"), [("completions", "turns"), ("chat", "both")])
def test_the_same_request_with_and_without(demo: Running, opened: Open, kind: str, how: str) -> None:
    page = opened(demo, view="race")
    page.select_option("#race-kind", kind)
    page.select_option("#race-how", how)
    *before, one, other = race(page)
    assert [body["max_tokens"] for body in before] == ([1] if how == "turns" else [])
    plain, fast = (one, other) if "speculative" in one else (other, one)
    assert plain.pop("speculative") == {"enabled": False}
    assert plain.pop("cache_salt") != fast.pop("cache_salt")
    assert plain == fast and fast["temperature"] == 0
    wait_for(VERDICT + "The texts are equal: all 48 tokens\\.$", page, "#race-verdict")
    texts = [page.text_content(f"#{lane}-text") for lane in ("fast", "plain")]
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    choice = httpx.post(demo.url + path, json={**fast, "stream": False}, timeout=60).json()["choices"][0]
    assert texts == ["".join("".join(step["texts"]) for step in choice["spec_trace"])] * 2
    facts = [page.inner_text(f"#{lane}-facts") for lane in ("fast", "plain")]
    per_step = [float(re.fullmatch(r"48 tokens · ([\d.]+) per step · first after \d+ ms · [\d.]+ s", text)[1]) for text in facts]  # type: ignore[index]
    assert per_step[0] > 1.5 and per_step[1] == 1
    rates = [int(page.inner_text(f"#{lane}-rate").replace(",", "")) for lane in ("fast", "plain")]
    ratio = float(page.inner_text("#race-verdict").split()[0])
    assert ratio == pytest.approx(rates[0] / rates[1], rel=0.05, abs=0.02)


@pytest.mark.parametrize(("gap", "end"), [(0.01, "a tie, which rounding decides."), (0.5, "no tie.")])
def test_where_texts_differ_it_says_at_which_token_and_whether_that_was_a_tie(demo: Running, opened: Open, gap: float, end: str) -> None:
    page = opened(demo, view="race")

    def altered(route: Any) -> None:
        """Without speculation the tenth token is another one."""
        if "speculative" not in route.request.post_data_json or route.request.post_data_json["max_tokens"] == 1:
            return route.continue_()
        chunks = [json.loads(line.removeprefix("data: ")) for line in route.fetch().text().split("\n\n") if line.startswith("data: {")]
        chunk = chunks[9]["choices"][0]
        (step,), scores = chunk["spec_trace"], chunk["logprobs"]
        was, step["tokens"], step["texts"] = step["tokens"][0], [7], ["other"]
        scores["top_logprobs"] = [{"token_id:7": -0.5, f"token_id:{was}": -0.5 - gap}]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in chunks) + "data: [DONE]\n\n"
        return route.fulfill(status=200, body=body, content_type="text/event-stream")

    page.route("**/v1/completions", altered)
    race(page, tokens=16)
    said = page.inner_text("#race-verdict")
    assert "The texts differ from token 10 on: " in said and '"other" without' in said
    assert f"Their log-probabilities were {-0.5 - gap:.4f} and -0.5000: {end}" in said
    assert page.locator("#plain-text .differs").inner_text() == "other"
    assert page.locator("#fast-text .differs").count() == 1


def test_texts_are_shown_while_they_are_measured(demo: Running, opened: Open) -> None:
    """Paler than in the replay; the other lane says what it waits for."""
    page = opened(demo, view="race")
    page.evaluate(
        """() => {
             window.seen = [];
             const facts = () => $("fast-facts").textContent;
             const note = (box) => seen.push([box.id.split("-")[0], box.matches(".measuring"), facts(), box.textContent]);
             const watched = new MutationObserver((changes) => { for (const { target } of changes) note(target); });
             for (const lane of ["fast", "plain"]) watched.observe($(lane + "-text"), { childList: true });
           }"""
    )
    race(page, tokens=768)
    seen = page.evaluate("seen.filter(([, , , text]) => text)")
    pale = [each for each in seen if each[1]]
    assert [lane for lane, *_ in pale] == sorted((lane for lane, *_ in pale), reverse=True)  # plain, then fast
    assert {"plain", "fast"} == {lane for lane, *_ in pale}
    assert all(facts == "Starts when the run without drafts has ended." for lane, _, facts, _ in pale if lane == "plain")
    assert all(len(text) < len(page.text_content("#plain-text")) for lane, _, _, text in pale[:1])
    assert {lane for lane, dimmed, *_ in seen if not dimmed} == {"plain", "fast"} and not page.locator(".measuring").count()


def answers_of(model: str, chat: bool, algorithm: str | None, steps: int) -> Any:
    """What /stats would say of another model."""

    def changed(route: Any) -> None:
        body = {"model": model, "chat": chat, "speculative_algorithm": algorithm, "speculative_steps": steps}
        route.fulfill(json=route.fetch().json() | body)

    return changed


PROMPTS = ("#race-prompt", "#prompt", "#trees-prompt")
KINDS = ("#race-kind", "#kind", "#trees-kind")


@pytest.mark.parametrize(
    ("model", "chat", "first", "kind"),
    [("demo", False, "import os", "completions"), ("other", True, "Explain in", "chat"), ("other", False, "The printing", "completions")],
)
def test_prompts_suit_the_model(demo: Running, opened: Open, model: str, chat: bool, first: str, kind: str) -> None:
    page = opened(demo, view="race")
    page.route("**/stats", answers_of(model, chat, "MTP", 3))
    page.reload()
    wait_for(f"^{model}$", page, "#model")
    assert all(page.input_value(prompt).startswith(first) for prompt in PROMPTS)
    assert [page.input_value(each) for each in KINDS] == [kind] * 3
    assert all(page.locator(f"{each} [value=chat]").is_disabled() == (not chat) for each in KINDS)


@pytest.mark.parametrize(
    ("algorithm", "steps", "facts", "legend"),
    [
        ("NGRAM", 2, r"drafts up to 2 tokens ahead \(n-grams\), in \d+ % of the steps$", ["n-gram, depth 1", "n-gram, depth 2"]),
        ("MTP+NGRAM", 1, r"drafts up to 1 token ahead \(MTP layer\) and 8 \(n-grams\), in \d+ % of the steps$", ["MTP layer, depth 1"]),
        (None, 0, "no drafts: plain decoding$", []),
    ],
)
def test_header_and_legend_name_the_drafter_that_is_there(
    demo: Running, opened: Open, algorithm: str | None, steps: int, facts: str, legend: list[str]
) -> None:
    httpx.post(demo.url + "/v1/completions", json={"prompt": "import os", "max_tokens": 8}, timeout=60)
    page = opened(demo)
    page.route("**/stats", answers_of("other", False, algorithm, steps))
    page.reload()
    wait_for("^other$", page, "#model")
    wait_for(facts, page, "#facts")
    assert [text.removeprefix("token ").strip() for text in page.locator("#legend li").all_inner_texts()] == ["the model's own", *legend]


# The widest option's text, and the room that the select has for it beside its arrow.
CUT_SELECTS = """() => [...document.querySelectorAll('select')].filter((each) => each.checkVisibility()).filter((each) => {
  const style = getComputedStyle(each), pen = document.createElement('canvas').getContext('2d');
  pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  const widest = Math.max(...[...each.options].map((option) => pen.measureText(option.text).width));
  return widest + 20 > each.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
}).map((each) => each.id)"""


@pytest.mark.parametrize("width", [320, 390, 768])
def test_selects_show_what_is_chosen(demo: Running, opened: Open, width: int) -> None:
    page = opened(demo, {"width": width, "height": 800}, view="race")
    assert page.is_visible("#race-how")
    for view in ("race", "text", "watch"):
        page.evaluate("(view) => { location.hash = view; }", view)
        page.wait_for_timeout(50)
        assert page.evaluate(CUT_SELECTS) == []


def test_a_refused_race_says_why_and_one_can_be_stopped(demo: Running, opened: Open) -> None:
    page = opened(demo, view="race")
    race(page, tokens=100_000, verdict="must be below the context of 2048")
    never_ending(page, "/v1/completions")
    page.fill("#race-tokens", "1900")
    page.click("#race-start")
    wait_for("^Measuring .*: ", page, "#race-verdict")
    page.keyboard.press("Escape")
    wait_for(r"^Stopped\.$", page, "#race-verdict")
    assert page.is_enabled("#race-start") and page.is_disabled("#race-stop")


def test_a_replay_ends_where_the_race_did(demo: Running, opened: Open) -> None:
    page = opened(demo, view="race")
    race(page, tokens=24)
    said, text = page.inner_text("#race-verdict"), page.text_content("#fast-text")
    page.click("#race-again")
    wait_for("^Replaying ", page, "#race-verdict")  # what came of it is not told before it is seen
    wait_for(VERDICT, page, "#race-verdict")
    assert page.inner_text("#race-verdict") == said and page.text_content("#fast-text") == text


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_it_can_be_read_and_reached(demo: Running, opened: Open, size: dict[str, int], scheme: str) -> None:
    page = opened(demo, size, scheme, view="race")
    sound(page)
    race(page, tokens=768 if os.environ.get("MTPSERVE_SCREENSHOTS") else 32)
    sound(page)
    lanes = [page.locator(f"#{lane}-text").bounding_box() for lane in ("fast", "plain")]
    assert lanes[0]["y"] == lanes[1]["y"] and lanes[0]["x"] < lanes[1]["x"]
    tree = page.locator("#view-race").aria_snapshot()
    for part in ('textbox "Prompt"', 'combobox "Run"', 'region "Text with drafts"', 'region "Text without drafts"', "status"):
        assert part in tree
    if os.environ.get("MTPSERVE_SCREENSHOTS"):
        page.screenshot(path=ROOT / "docs" / f"page-race-{'wide' if size == WIDE else 'phone'}-{scheme}.png", full_page=True)
        if size == WIDE:
            recorded(page, ROOT / "docs" / f"page-race-{scheme}.gif")


def recorded(page: Any, path: Path) -> None:
    """A replay from below the buttons on, each frame for as long as it was seen; the last one for three seconds."""
    image = pytest.importorskip("PIL.Image")
    box = page.locator("#view-race").bounding_box()
    top = page.locator("#race-verdict").bounding_box()["y"] - 8
    area = (box["x"], top, box["x"] + box["width"], box["y"] + box["height"])
    session, frames = page.context.new_cdp_session(page), list[tuple[float, Any]]()

    def shown(frame: dict[str, Any]) -> None:
        frames.append((frame["metadata"]["timestamp"], image.open(BytesIO(b64decode(frame["data"]))).convert("RGB").crop(area)))
        session.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    session.on("Page.screencastFrame", shown)
    session.send("Page.startScreencast", {"format": "png"})
    page.click("#race-again")
    wait_for("^Replaying ", page, "#race-verdict")
    wait_for(VERDICT, page, "#race-verdict")
    page.wait_for_timeout(300)
    session.send("Page.stopScreencast")
    # They need not come in their order, and may come faster than a GIF shows them.
    seen = list[tuple[float, Any]]()
    for at, frame in sorted(frames, key=lambda frame: frame[0]):
        if not seen or at >= seen[-1][0] + 0.04 or frame is max(frames, key=lambda frame: frame[0])[1]:
            seen.append((at, frame))
    lasting = [max(20, round(1000 * (after - at))) for (at, _), (after, _) in pairwise(seen)]
    colours = seen[-1][1].quantize(64)  # one palette, so that what does not change is not stored again
    first, *others = (frame.quantize(palette=colours, dither=0) for _, frame in seen)
    first.save(path, save_all=True, append_images=others, duration=[*lasting, 3000], loop=0, optimize=True)
