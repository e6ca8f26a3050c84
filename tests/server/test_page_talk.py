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
from typing import Any

import httpx
import pytest

from tests.server.browsing import NARROW, PHONE, ROOT, WIDE, Open, Running, launched, never_ending, sound, wait_for

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


def instead(page: Any, text: str, reasoning: str = "") -> None:
    """The next answers say this, in the form in which the server sends them."""
    deltas = [{"role": "assistant"}, *({"reasoning_content": part} for part in re.findall(r"\S+\s*", reasoning))]
    deltas += [{"content": part} for part in re.findall(r"\s*\S+\s*", text)]
    step = {"tokens": [5], "texts": ["x"], "proposed": []}
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta, "spec_trace": [step]}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=body, content_type="text/event-stream"))


def say(page: Any, text: str = "read lines", *, answers: int = 1, tokens: int = 24) -> dict[str, Any]:
    """What was sent, after its answer is complete."""
    page.fill("#talk-max-tokens", str(tokens))
    page.fill("#message", text)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator("#message").press("Enter")
    complete(page, answers)
    return sent.value.post_data_json


def complete(page: Any, answers: int) -> None:
    page.wait_for_selector("#turns[aria-busy=false]")
    page.wait_for_function("(n) => document.querySelectorAll('.turn.assistant .acts').length === n", arg=answers)


def act(page: Any, name: str, turn: int) -> None:
    page.locator(".turn").nth(turn).get_by_role("button", name=name, exact=True).click()


def options(page: Any) -> None:
    if page.get_attribute("#talk-options", "open") is None:
        page.click("#talk-options summary")


def test_a_conversation_with_its_history_and_its_options(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.fill("#system", "be brief")
    for field, value in (("temperature", "0"), ("top-p", "0.5"), ("seed", "7")):
        page.fill(f"#talk-{field}", value)
    first = say(page)
    said = {"model": "demo", "stream": True, "temperature": 0, "top_p": 0.5, "seed": 7, "max_tokens": 24}
    assert said.items() <= first.items()
    begin = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "read lines"}]
    assert first["messages"] == begin
    plain = {**first, "stream": False}
    del plain["stream_options"]
    answer = httpx.post(demo.url + "/v1/chat/completions", json=plain, timeout=60).json()["choices"][0]["message"]["content"]
    assert re.fullmatch(r"the limit was reached · 24 tokens · [\d.]+ per step.* · first after \d+ ms", page.inner_text(".told"))
    assert say(page, "and now?", answers=2)["messages"] == [
        *begin,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and now?"},
    ]
    assert page.locator(".turn h2").all_inner_texts() == ["You", "demo", "You", "demo"]
    page.reload()
    page.wait_for_selector(".turn.assistant .acts")
    assert page.locator(".turn").count() == 4 and page.input_value("#system") == "be brief"
    page.click("#talk-new")
    assert page.locator(".turn").count() == 0 and page.is_visible("#turns-empty")


def test_retry_and_edit(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.fill("#talk-temperature", "0")
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
    page.fill("#talk-max-tokens", "1900")
    page.fill("#message", "read")
    page.click("#talk-send")
    page.wait_for_selector(".turn.assistant .prose :text-matches('..')")
    assert page.is_disabled("#talk-send")
    page.click("#talk-stop") if how == "Stop" else page.keyboard.press(how)
    wait_for("^stopped · ", page, ".told")
    assert page.is_enabled("#talk-send") and page.evaluate("document.activeElement.id") == "message"


def test_markdown_is_drawn(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    instead(page, MARKDOWN, reasoning="I **think** so.")
    say(page)
    prose = page.locator(".turn.assistant > .prose")
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
    page.fill("#tools", "{")
    page.fill("#message", "weather?")
    page.click("#talk-send")
    wait_for("^Tools: .*JSON", page, "#tools-note")
    assert page.locator(".turn").count() == 0
    page.fill("#tools", json.dumps([TOOL]))
    page.select_option("#tool-choice", "required")
    page.fill("#talk-temperature", "0")
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
    page.fill("#talk-temperature", "0")
    say(page, tokens=48)
    text = page.inner_text(".turn.assistant .prose")
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
    page.fill("#talk-temperature", "0")
    asked = say(page, 'it\'s "quoted" \\ and\nnew $HOME `x`')
    act(page, "Export", 1)
    command = shlex.split(page.locator("#export-curl pre").text_content())
    assert command[:3] == ["curl", "--no-buffer", demo.url + "/v1/chat/completions"]
    assert json.loads(command[command.index("-d") + 1]) == asked
    script = page.locator("#export-python pre").text_content()
    page.keyboard.press("Escape")
    assert page.is_hidden("#export")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    plain = {**asked, "stream": False}
    del plain["stream_options"]
    answer = httpx.post(demo.url + "/v1/chat/completions", json=plain, timeout=60).json()
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
    page.fill("#talk-seed", "10000000000000000000000")
    say(page)
    assert "seed" in page.locator(".turn.assistant [role=alert]").inner_text()
    page.fill("#talk-seed", "1")
    page.fill("#talk-max-tokens", "4")
    act(page, "Retry", 1)
    wait_for("4 tokens", page, ".told")


@pytest.fixture(scope="module")
def toy(chromium: str) -> Iterator[Running]:
    """The demo as it is: it has no chat template."""
    yield from launched("--no-speculative-adaptive")


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
@pytest.mark.parametrize("size", [WIDE, NARROW, PHONE], ids=["wide", "narrow", "phone"])
def test_it_can_be_read_and_reached(demo: Running, opened: Open, size: dict[str, int], scheme: str) -> None:
    page = opened(demo, size, scheme, view="talk")
    top = page.evaluate("['message', 'talk-options'].map((id) => document.getElementById(id).getBoundingClientRect().top)")
    assert size == WIDE or (top[0] < size["height"] < top[1] + size["height"] and top[0] < top[1])
    sound(page)
    options(page)
    page.fill("#talk-temperature", "0")
    instead(page, MARKDOWN, reasoning="Lines are read one by one.")
    say(page, "How do I read the lines of a file in Python?")
    page.click(".thought summary")
    sound(page)
    page.evaluate("turns[1].told = ''")  # no picture has numbers that were not measured
    page.unroute("**/v1/chat/completions")
    say(page, "import os\n\ndef read_lines(path):", answers=2, tokens=64)
    act(page, "Tokens", 3)
    sound(page)
    if os.environ.get("MTPSERVE_SCREENSHOTS") and size != NARROW:
        page.screenshot(path=ROOT / "docs" / f"page-talk-{'wide' if size == WIDE else 'phone'}-{scheme}.png", full_page=True)


def test_by_keyboard_alone(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.locator("#tab-talk").focus()
    reached = []
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:5] == ["mode-talk", "message", "talk-send", "talk-copy", "talk-new"]
    fields = ["system", "talk-temperature", "talk-top-p", "talk-seed", "talk-max-tokens", "tools", "tool-choice", "show-tokens"]
    assert reached[5:14] == ["SUMMARY", *fields]
    tree = page.locator("main").aria_snapshot()
    for part in ('tabpanel "Talk"', 'radio "Conversation" [checked]', 'region "Conversation"', 'textbox "Message"', 'button "Send"'):
        assert part in tree
