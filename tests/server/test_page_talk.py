"""The page's conversation in a real browser: what is sent, what is shown, and what a person can do with it.

MTPSERVE_SCREENSHOTS=1 also writes docs/page-talk-*.png.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.server.browsing import DESK, NARROW, PHONE, ROOT, TABLET, WIDE, Open, Running, launched, never_ending, sound, wait_for
from tests.server.talking import act, complete, instead, say, settings

MARKDOWN = """# Reading lines

Use `open` in a **with** block, see [the docs](https://docs.example/open), and *never* forget it:

```python
with open(path) as file:
    return [line.rstrip("\\n") for line in file]
```

1. one
2. two
   - nested

| mode | meaning |
|------|--------:|
| r    | read    |
"""
HOSTILE = """<img src=x onerror="document.title='pwned'"> <script>document.title='pwned'</script>
[a](javascript:document.title='pwned') [b](data:text/html,x) ![c](https://tracker.example/c.png) [d](vbscript:x)
`<b>` **<i>x</i>** <https://ok.example/"onmouseover="x>

```<svg onload=alert(1)>
</code></pre><script>document.title='pwned'</script>
```
| <img src=x> | b |
|---|---|
| [e](JaVaScRiPt:alert(1)) | <iframe src="https://x.example"> |
"""
NARROW_SCREEN = 860
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Berlin"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_conversation_with_its_history_and_its_options(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    settings(page, system="be brief", temperature=0, top_p=0.5, top_k=4, min_p=0.01, presence_penalty=0.25, frequency_penalty=0.5, seed=7)
    first = say(page)
    said = {"model": "demo", "stream": True, "temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.01, "seed": 7, "max_tokens": 24}
    said |= {"presence_penalty": 0.25, "frequency_penalty": 0.5}
    assert said.items() <= first.items()
    begin = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "read lines"}]
    assert first["messages"] == begin
    plain = {**first, "stream": False}
    del plain["stream_options"]
    answer = httpx.post(demo.url + "/v1/chat/completions", json=plain, timeout=60).json()["choices"][0]["message"]["content"]
    assert re.fullmatch(
        r"the limit of max tokens was reached · 24 tokens · [\d,]+ tokens/s · [\d.]+ tokens per step · first token after \d+ ms",
        page.inner_text(".told"),
    )
    assert say(page, "and now?", answers=2)["messages"] == [
        *begin,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and now?"},
    ]
    assert page.locator(".turn h2").all_text_contents() == ["You", "demo", "You", "demo"]
    assert re.fullmatch(r"\d+ of 2,048 tokens of context", page.inner_text("#context-note"))
    page.reload()
    page.wait_for_selector(".turn.assistant .acts")
    assert page.locator(".turn").count() == 4 and page.input_value("#system") == "be brief"
    page.click("#talk-new")
    assert page.locator(".turn").count() == 0 and page.is_visible("#turns-empty")


def test_retry_and_edit(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    settings(page, temperature=0)
    first = say(page)
    say(page, "second", answers=2)
    with page.expect_request("**/v1/chat/completions") as again:
        act(page, "Retry", 1)
    complete(page, 1)
    assert again.value.post_data_json == first
    act(page, "Edit", 0)
    field = page.get_by_role("textbox", name="Message, edited")
    assert field.input_value() == "read lines"
    page.keyboard.press("Escape")
    assert page.locator(".turn.user .prose").inner_text() == "read lines"
    assert page.evaluate("document.activeElement.textContent") == "Edit"
    act(page, "Edit", 0)
    field.fill("write lines")
    with page.expect_request("**/v1/chat/completions") as edited:
        page.get_by_role("button", name="Send again").click()
    complete(page, 1)
    assert edited.value.post_data_json["messages"] == [{"role": "user", "content": "write lines"}]


@pytest.mark.parametrize("how", ["Stop", "Escape"])
def test_stopping(demo: Running, opened: Open, how: str) -> None:
    page = opened(demo, view="talk")
    never_ending(page, "/v1/chat/completions")
    settings(page, max_tokens=1900)
    page.fill("#message", "read")
    page.click("#talk-send")
    page.wait_for_selector(".turn.assistant .prose :text-matches('..')")
    assert page.is_disabled("#talk-send") and page.is_visible("#talk-stop")
    page.click("#talk-stop") if how == "Stop" else page.keyboard.press(how)
    wait_for("^stopped · ", page, ".told")
    assert page.is_enabled("#talk-send") and page.evaluate("document.activeElement.id") == "message"


def test_markdown_is_drawn(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    instead(page, MARKDOWN, reasoning="I **think** so.")
    say(page)
    prose = page.locator(".turn.assistant .body > .prose")
    for selector, text in (
        ("h3", "Reading lines"),
        ("strong", "with"),
        ("em", "never"),
        ("p > code", "open"),
        ("ol > li > ul > li", "nested"),
    ):
        assert prose.locator(selector).inner_text() == text
    assert prose.locator("ol > li").count() == 2
    assert prose.locator("td.end").inner_text() == "read"
    link = prose.locator("a")
    assert (link.get_attribute("href"), link.get_attribute("rel")) == ("https://docs.example/open", "noopener noreferrer")
    code = 'with open(path) as file:\n    return [line.rstrip("\\n") for line in file]'
    assert prose.locator("pre").text_content() == code
    prose.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == code
    assert page.is_hidden(".thought .prose")
    page.click(".thought summary")
    assert page.locator(".thought .prose strong").inner_text() == "think"
    page.click("#talk-copy")
    assert page.evaluate("navigator.clipboard.readText()") == f"You:\nread lines\n\ndemo:\n{MARKDOWN}"


def test_markup_in_a_text_stays_text(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    instead(page, HOSTILE)
    say(page, "<img src=x onerror=\"document.title='pwned'\">")
    assert page.title() == "demo – mtpserve"
    assert page.locator("#turns :is(img, script, iframe, svg, object, style)").count() == 0
    links = page.evaluate("[...document.querySelectorAll('#turns a')].map((each) => each.protocol)")
    assert links and set(links) == {"https:"}
    attributes = page.evaluate("[...document.querySelectorAll('#turns *')].flatMap((each) => each.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcdoc")]
    assert not [url for url in asked if not url.startswith(demo.url)]
    for text in ("<script>document.title='pwned'</script>", "[a](javascript:document.title='pwned')", "<i>x</i>", "<img src=x>"):
        assert text in page.inner_text(".turn.assistant")


def test_long_runs_of_signs_are_drawn_at_once(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    for sign in ("[", "*a", "`", "> ", "- ", "|-", "_a", "[a](", "1. ", "~~a"):
        took = page.evaluate("(text) => { const at = performance.now(); markdown(text); return performance.now() - at; }", sign * 8000)
        assert took < 10_000, sign


def test_tools_are_offered_called_and_answered(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.click("#settings-open")
    page.click("#tools-details summary")
    page.fill("#tools", "{")
    page.fill("#message", "weather?")
    page.click("#talk-send")
    wait_for("^Tools: .*JSON", page, "#tools-note")
    assert page.locator(".turn").count() == 0
    page.fill("#tools", json.dumps([TOOL]))
    page.select_option("#tool-choice", "required")
    settings(page, temperature=0)
    assert say(page, "weather?", tokens=64)["tools"] == [TOOL]
    calls = page.get_by_role("region", name="Call of get_weather")
    assert [json.loads(text) for text in calls.locator("pre").all_inner_texts()] == [{"city": "Berlin"}] * calls.count()
    page.select_option("#tool-choice", "none")
    with page.expect_request("**/v1/chat/completions") as sent:
        for number in range(calls.count()):
            page.get_by_role("textbox", name="Result of get_weather").first.fill(f"sunny {number}")
            page.get_by_role("button", name="Send result").first.click()
    complete(page, 2)
    _, asked, *results = sent.value.post_data_json["messages"]
    assert {call["function"]["name"] for call in asked["tool_calls"]} == {"get_weather"}
    assert results == [
        {"role": "tool", "content": f"sunny {number}", "tool_call_id": call["id"]} for number, call in enumerate(asked["tool_calls"])
    ]
    assert page.locator(".turn.assistant .bad").count() == 0


def test_tokens_in_the_colour_of_their_source(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    settings(page, temperature=0)
    say(page, tokens=48)
    text = page.inner_text(".turn.assistant .prose")
    page.click("#settings-open")
    act(page, "Tokens", 1)
    assert page.evaluate("document.activeElement.ariaPressed") == "true"
    tokens = page.locator(".turn.assistant .t")
    assert tokens.count() == 48 and page.locator(".turn.assistant .drafted").count() > 0
    counts = [int(count) for count in page.locator("#talk-legend b").all_inner_texts() if count]
    assert sum(counts) == 48
    act(page, "Tokens", 1)
    assert page.inner_text(".turn.assistant .prose") == text and page.is_hidden("#talk-legend")
    page.check("#show-tokens")
    assert tokens.count() == 48


def test_an_exported_request_is_the_request(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    settings(page, temperature=0, top_k=7, min_p=0.1)
    asked = say(page, 'it\'s "quoted" \\ and\nnew $HOME `x`')
    act(page, "Export", 1)
    command = shlex.split(page.locator("#export-curl pre").text_content())
    assert command[:3] == ["curl", "--no-buffer", demo.url + "/v1/chat/completions"]
    exported = json.loads(command[command.index("-d") + 1])
    assert asked == {**exported, "return_spec_trace": True, "stream_options": {"include_usage": True}}
    script = page.locator("#export-python pre").text_content()
    page.keyboard.press("Escape")
    assert page.is_hidden("#export")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "return_spec_trace" not in script and "stream_options" not in script
    answer = httpx.post(demo.url + "/v1/chat/completions", json={**exported, "stream": False}, timeout=60).json()
    assert run.stdout == answer["choices"][0]["message"]["content"]


def test_an_exported_request_does_not_have_the_key(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.evaluate("sessionStorage.setItem('mtpserve-key', 'secret')")
    say(page, tokens=4)
    act(page, "Export", 1)
    for language in ("curl", "python"):
        text = page.locator(f"#export-{language} pre").text_content()
        assert "secret" not in text and "MTPSERVE_API_KEY" in text


def test_a_refused_request_says_why_and_can_be_sent_again(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    settings(page, seed=10000000000000000000000)
    say(page)
    assert "seed" in page.locator(".turn.assistant [role=alert]").inner_text()
    settings(page, seed=1)
    settings(page, max_tokens=4)
    act(page, "Retry", 1)
    wait_for("4 tokens", page, ".told")


@pytest.fixture(scope="module")
def toy(chromium: str) -> Iterator[Running]:
    """The demo as it is: it has no chat template."""
    yield from launched("--no-speculative-adaptive")


def test_before_the_server_says_what_the_model_is_no_view_is_shown(demo: Running, opened: Open) -> None:
    page = opened(demo, view="")
    assert page.is_visible("#message") and page.evaluate("document.activeElement.id") == "message"
    loading = '{"error": {"message": "the model is loading", "type": "server_error", "param": null, "code": "overloaded"}}'
    page.route("**/stats", lambda route: route.fulfill(status=503, body=loading, content_type="application/json"))
    page.reload()
    wait_for("^the model is loading$", page, "#status.loading")
    assert page.is_visible("#wait-note") and page.locator("[role=tabpanel]:visible").count() == 0
    sound(page)
    page.unroute("**/stats")
    page.wait_for_selector("#message")
    assert page.is_hidden("#wait-note")


@pytest.mark.parametrize("view", ["", "talk"])
def test_the_demo_opens_with_a_text_to_continue_and_says_what_it_is(toy: Running, opened: Open, view: str) -> None:
    page = opened(toy, view=view)
    assert page.is_visible("#prompt") and page.is_hidden("#message")
    assert page.locator("[role=tab]:visible").all_inner_texts() == ["Text to continue", "Side by side", "Watch"]
    assert (
        page.inner_text("#about-text")
        == "This is a 6 M-parameter toy that was trained on Python source. It continues code and cannot converse."
    )
    page.click("#send")
    page.wait_for_selector("#output[aria-busy=false] .t")
    page.click("#about a")
    page.wait_for_selector("#view-race", state="visible")


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, WIDE, TABLET, NARROW, PHONE], ids=["desk", "wide", "tablet", "narrow", "phone"])
def test_it_can_be_read_and_reached(demo: Running, opened: Open, size: dict[str, int], scheme: str) -> None:
    page = opened(demo, size, scheme, view="talk")
    sound(page)
    heights = [page.locator(part).bounding_box()["height"] for part in ("header", ".tabs")]
    assert heights[0] < heights[1] + (60 if size["width"] <= NARROW_SCREEN else 30), "the head is one row, and on narrow screens the tabs"
    settings(page, temperature=0)
    instead(page, MARKDOWN, reasoning="Lines are read one by one.")
    say(page, "How do I read the lines of a file in Python?")
    page.click(".thought summary")
    sound(page)
    page.evaluate("turns[1].told = ''")  # no picture has numbers that were not measured
    page.unroute("**/v1/chat/completions")
    say(page, "import os\n\ndef read_lines(path):", answers=2, tokens=64)
    act(page, "Tokens", 3)
    sound(page)
    for panel in ("history", "settings"):
        if page.is_hidden(f"#{panel}"):
            page.click(f"#{panel}-open")
        sound(page)
        if size["width"] <= NARROW_SCREEN or panel == "settings":
            page.click(f"#{panel}-close")
    if os.environ.get("MTPSERVE_SCREENSHOTS") and size in (WIDE, PHONE):
        page.screenshot(path=ROOT / "docs" / f"page-talk-{'wide' if size == WIDE else 'phone'}-{scheme}.png")


@pytest.mark.parametrize("size", [DESK, TABLET, PHONE], ids=["desk", "tablet", "phone"])
def test_the_conversation_fills_the_window_with_the_field_at_its_bottom(demo: Running, opened: Open, size: dict[str, int]) -> None:
    page = opened(demo, size, view="talk")
    instead(page, MARKDOWN * 4)
    for turns in (0, 1, 2):
        if turns:
            say(page, answers=turns)
        form, scroll = page.locator("#talk-form").bounding_box(), page.locator("#scroll").bounding_box()
        assert size["height"] - 24 < form["y"] + form["height"] < size["height"] and scroll["height"] > size["height"] * 0.6
        assert page.evaluate("document.documentElement.scrollHeight") == size["height"]
        assert page.evaluate("$('scroll').scrollHeight - $('scroll').scrollTop - $('scroll').clientHeight") <= 1
    assert page.is_hidden("#to-end")
    page.evaluate("$('scroll').scrollTop = 0")
    page.click("#to-end")
    assert page.evaluate("$('scroll').scrollHeight - $('scroll').scrollTop - $('scroll').clientHeight") <= 1


def test_by_keyboard_alone(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.click("#settings-open")
    page.locator("#tab-talk").focus()
    reached = []
    for _ in range(34):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent.trim() || document.activeElement.tagName")
        )
    assert reached[:7] == ["API", "theme", "help-open", "history-close", "talk-new", "history-open", "settings-open"]
    message = reached.index("message")
    assert len([name for name in reached[7:message] if name.startswith(("Explain", "Write", "Plan", "Compare"))]) == 4
    assert reached[message : message + 4] == ["message", "attach", "talk-send", "settings-close"]
    fields = ["temperature", "top-p", "top-k", "min-p", "presence-penalty", "frequency-penalty", "max-tokens", "seed"]
    assert reached[message + 4 : message + 15] == ["system", *(f"talk-{name}" for name in fields), "show-tokens", "Tools"]
    assert reached[message + 15] == "settings-reset"
    tree = page.locator("main").aria_snapshot()
    for part in ('tabpanel "Talk"', 'complementary "Conversations"', 'region "Conversation"', 'textbox "Message"', 'button "Send"'):
        assert part in tree
