"""What the page keeps and what it takes, in a real browser: conversations, settings, colours, files, and what its keys do."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.browsing import PHONE, Open, Running, never_ending, sound, wait_for
from tests.server.talking import act, complete, instead, say, settings

CODE = "Like this:\n\n```py\ndef f(x):  # <b>\n    return 'a' + str(1)\n```\n"


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator("#history-list .entry").all_inner_texts()
    return found


def stored(page: Any) -> list[dict[str, Any]]:
    """What the browser's database has."""
    found: list[dict[str, Any]] = page.evaluate("within('readonly', (store) => store.getAll())")
    return found


def everything(page: Any) -> str:
    """All that outlives the tab, as one text."""
    return json.dumps([stored(page), page.evaluate("Object.entries(localStorage)")])


def test_conversations_are_kept_listed_renamed_and_deleted(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    instead(page, "An answer.")
    say(page, "the first question")
    page.click("#talk-new")
    assert page.locator(".turn").count() == 0
    say(page, "the second question")
    assert titles(page) == ["the second question", "the first question"]
    new = opened(demo, view="talk", beside=page)
    new.wait_for_selector("#history-list .entry")
    assert new.locator(".turn").count() == 0, "a new tab begins a new conversation"
    new.get_by_role("button", name="the first question", exact=True).click()
    assert new.locator(".turn .prose").all_inner_texts() == ["the first question", "An answer."]
    assert new.inner_text("#talk-title") == "the first question"
    new.get_by_role("button", name="Rename the first question").click()
    new.get_by_role("textbox", name="Name of the conversation").fill("my name")
    new.keyboard.press("Enter")
    wait_for("^my name$", page, "#history-list li:last-child .entry")
    instead(new, "More.")
    say(new, "a third message", answers=2)
    assert titles(new) == ["my name", "the second question"], "a person's name stays, and the last one used is first"
    new.reload()
    new.wait_for_selector(".turn.assistant .acts")
    assert new.locator(".turn").count() == 4
    new.get_by_role("button", name="Delete my name").click()
    assert titles(new) == ["the second question"] and new.locator(".turn").count() == 0
    wait_for("was deleted", new, "#undo-text")
    new.click("#undo")
    assert titles(new) == ["my name", "the second question"]
    new.get_by_role("button", name="Delete the second question").click()
    page.reload()
    page.wait_for_selector("#history-list .entry")
    assert titles(page) == ["my name"] == [one["title"] for one in stored(page)]


def test_all_can_be_deleted_and_an_answer_that_still_comes_brings_none_back(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    instead(page, "An answer.")
    for text in ("one", "two"):
        say(page, text)
        page.click("#talk-new")
    page.unroute("**/v1/chat/completions")
    never_ending(page, "/v1/chat/completions")
    page.fill("#message", "three")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .prose :text-matches('..')")
    assert titles(page) == ["three", "two", "one"]
    page.click("#history-clear")
    wait_for("^3 conversations were deleted", page, "#undo-text")
    page.wait_for_selector("#turns[aria-busy=false]", state="attached")
    assert titles(page) == stored(page) == [] and page.is_hidden("#history-clear")
    page.click("#undo")
    assert titles(page) == ["three", "two", "one"]
    page.wait_for_selector("#talk-new:focus")
    page.reload()
    page.wait_for_selector("#history-list .entry")
    assert titles(page) == ["three", "two", "one"]


def test_conversations_can_be_searched(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    for number in range(6):
        assert page.is_hidden("#history-search")
        instead(page, f"answer {number}")
        say(page, f"question {number}")
        page.unroute("**/v1/chat/completions")
        page.click("#talk-new")
    page.fill("#history-search", "ANSWER 4")
    assert titles(page) == ["question 4"]
    page.fill("#history-search", "nowhere")
    assert titles(page) == [] and "Nothing is found." in page.inner_text("#history-list")


def test_nothing_that_stays_has_the_key_or_the_tokens(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.evaluate("sessionStorage.setItem('mtpserve-key', 'sesame-secret')")
    say(page, "read lines")
    kept = everything(page)
    assert "read lines" in kept and "sesame" not in kept and '"trace"' not in kept and "return_spec_trace" in kept


def test_another_conversation_stops_the_answer_and_keeps_what_came(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    never_ending(page, "/v1/chat/completions")
    page.fill("#message", "read")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .prose :text-matches('..')")
    page.click("#talk-new")
    page.wait_for_selector("#turns[aria-busy=false]", state="attached")
    assert page.locator(".turn").count() == 0
    page.get_by_role("button", name="read", exact=True).click()
    assert page.inner_text(".told").startswith("stopped · ") and page.inner_text(".turn.assistant .prose")


def test_settings_survive_a_new_tab_and_can_be_reset(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    assert page.inner_text("#sampling-note") == "temperature 0.6 · top-p 0.95"
    settings(page, system="be brief", temperature=0.25, top_p=1, top_k=20, min_p=0.05, max_tokens=9)
    new = opened(demo, view="talk", beside=page)
    assert new.inner_text("#sampling-note") == "temperature 0.25 · top-k 20 · min-p 0.05"
    instead(new, "Yes.")
    with new.expect_request("**/v1/chat/completions") as sent:
        new.fill("#message", "well?")
        new.keyboard.press("Enter")
    body = sent.value.post_data_json
    assert {"temperature": 0.25, "top_p": 1, "top_k": 20, "min_p": 0.05, "max_tokens": 9}.items() <= body.items()
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    complete(new, 1)
    new.click("#settings-open")
    new.click("#settings-reset")
    assert new.input_value("#talk-temperature") == new.input_value("#system") == "" and new.input_value("#talk-max-tokens") == "2048"
    assert new.inner_text("#sampling-note") == "temperature 0.6 · top-p 0.95"


def test_an_empty_field_shows_the_value_that_applies(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    values = {"temperature": 0.35, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "source": "checkpoint"}

    def altered(route: Any) -> None:
        route.fulfill(json={**route.fetch().json(), "default_sampling": values})

    page.route("**/stats", altered)
    page.reload()
    page.wait_for_selector("#status.ready")
    shown = [page.get_attribute(f"#talk-{name}", "placeholder") for name in ("temperature", "top-p", "top-k", "min-p", "presence-penalty")]
    assert shown == ["0.35", "0.8", "20", "0.05", "0"]
    assert page.get_attribute("#talk-max-tokens", "placeholder") == "2,048: the context"
    settings(page, temperature=0)
    assert page.inner_text("#sampling-note") == "temperature 0: always the likeliest token"


@pytest.mark.parametrize(
    ("source", "said", "sent"),
    [
        ("checkpoint", "the checkpoint's", {"temperature": 0.5}),
        ("mtpserve", "mtpserve's for chats", {"temperature": 0.5, "top_p": 0.95, "top_k": 0, "min_p": 0.05}),
    ],
)
def test_what_is_in_grey_applies_beside_a_value_that_was_typed(
    demo: Running, opened: Open, source: str, said: str, sent: dict[str, float]
) -> None:
    """Values that are only for chats that name none are sent with one that is named: the server would leave them out."""
    page = opened(demo, view="talk")
    values = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.05, "source": source}
    page.route("**/stats", lambda route: route.fulfill(json={**route.fetch().json(), "default_sampling": values}))
    page.reload()
    page.wait_for_selector("#status.ready")
    instead(page, "Yes.")
    assert not say(page).keys() & values.keys()
    settings(page, temperature=0.5)
    body = say(page, answers=2)
    assert {name: body[name] for name in values if name in body} == sent
    page.click("#settings-open")
    assert page.inner_text("#defaults-note") == f"An empty field uses the value in grey: {said}. This browser keeps the settings."


def test_a_wrong_value_is_not_sent_and_is_shown(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    settings(page, top_p=2)
    page.fill("#message", "hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("#settings", state="visible")
    assert page.evaluate("document.activeElement.id") == "talk-top-p"
    assert page.locator(".turn").count() == 0 and page.input_value("#message") == "hello"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_the_systems_or_those_that_were_chosen(demo: Running, opened: Open, scheme: str) -> None:
    page = opened(demo, scheme=scheme, view="talk")

    def is_dark(of: Any) -> bool:
        return bool(of.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 19)")

    assert page.get_attribute("#theme", "aria-label") == "Colours: system" and is_dark(page) == (scheme == "dark")
    seen = []
    for _ in range(2):
        page.click("#theme")
        seen.append((page.get_attribute("#theme", "aria-label"), is_dark(page)))
    assert seen == [("Colours: light", False), ("Colours: dark", True)]
    for path, ready in (("/", "#status.ready"), ("/docs", "#routes[aria-busy=false]")):
        assert is_dark(opened(demo, view="", path=path, ready=ready, beside=page))
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-label") == "Colours: system" and is_dark(page) == (scheme == "dark")


def test_example_questions_are_sent_by_a_click(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    instead(page, "Here it is.")
    examples = page.get_by_role("list", name="Example questions").get_by_role("button")
    assert examples.count() == 4
    with page.expect_request("**/v1/chat/completions") as sent:
        examples.nth(1).click()
    complete(page, 1)
    assert sent.value.post_data_json["messages"] == [
        {"role": "user", "content": "Write a Python function that counts the words of a text file."}
    ]
    assert examples.count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_is_coloured_by_its_language_and_stays_the_same_text(demo: Running, opened: Open, scheme: str) -> None:
    page = opened(demo, scheme=scheme, view="talk")
    instead(page, CODE + CODE.replace("py", "unknown"))
    say(page)
    known, unknown = page.locator("figure.code code").all()
    assert known.inner_text() == unknown.inner_text() == "def f(x):  # <b>\n    return 'a' + str(1)"
    colours = {
        name: known.locator(f".h-{name}").first.evaluate("(each) => getComputedStyle(each).color")
        for name in ("keyword", "title", "comment", "string", "number")
    }
    assert len(set(colours.values())) == 5
    assert unknown.locator("span").count() == known.locator("b").count() == 0
    sound(page)


def test_a_growing_text_keeps_what_was_drawn(demo: Running, opened: Open) -> None:
    """What a person selects in an answer that still grows stays selected; its end is what it would be if it came at once."""
    page = opened(demo, view="talk")
    text = "# One\n\n- a\n- b\n\n  more\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n" + CODE + "\nThe *end*, `of` it."
    kept, equal = page.evaluate(
        """(text) => {
          const box = make("div"), whole = make("div");
          let first = null, kept = true;
          for (let at = 1; at <= text.length; at += 1) {
            drawMarkdown(box, text.slice(0, at), true);
            if (at === 40) first = box.firstChild;
            if (at > 40 && box.firstChild !== first) kept = false;
          }
          drawMarkdown(box, text, false);
          whole.append(...markdown(text));
          return [kept, box.isEqualNode(whole)];
        }""",
        text,
    )
    assert kept and equal


def test_files_go_with_a_message(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    instead(page, "Read.")
    page.set_input_files("#file", [{"name": "a.py", "mimeType": "text/x-python", "buffer": b"x = '```'\n"}])
    page.wait_for_selector("#files .file")
    page.set_input_files("#file", [{"name": "b.pdf", "mimeType": "application/pdf", "buffer": b"\x89\x00\xff"}])
    wait_for("^b.pdf: only text files can be attached", page, "#files-note")
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["dropped"], "c.txt"));
          $("conversation").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }"""
    )
    page.wait_for_selector("#files .file:nth-child(2)")
    page.evaluate(
        """(text) => {
          const data = new DataTransfer();
          data.setData("text/plain", text);
          $("message").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
        }""",
        "long " * 1000,
    )
    assert page.locator("#files .file-name").all_inner_texts() == ["a.py", "c.txt", "pasted 3"]
    sound(page)
    page.get_by_role("button", name="Remove pasted 3").click()
    sent = say(page, "what is it?")
    content = "a.py:\n````py\nx = '```'\n````\n\nc.txt:\n```txt\ndropped\n```\n\nwhat is it?"
    assert sent["messages"] == [{"role": "user", "content": content}]
    assert page.locator("#files .file").count() == 0 and page.inner_text(".turn.user .body > .prose") == "what is it?"
    page.click(".turn.user summary >> nth=0")
    assert page.locator(".turn.user pre").first.inner_text() == "x = '```'\n"
    with page.expect_request("**/v1/chat/completions") as again:
        act(page, "Retry", 1)
    assert again.value.post_data_json["messages"] == sent["messages"]


def test_a_file_that_is_too_large_is_refused_by_name_and_size(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    page.set_input_files("#file", [{"name": "large.txt", "mimeType": "text/plain", "buffer": b"a" * (5 << 20)}])
    wait_for(r"^large.txt: it has 5,120 KiB, at most 4,096 can be attached\.$", page, "#files-note")


def test_keys_and_their_help(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    instead(page, "Yes.")
    page.keyboard.press("Control+/")
    page.wait_for_selector("#help[open]")
    sound(page)
    assert page.locator("#help dd").count() == page.locator("#help dt").count() == 10
    page.keyboard.press("Control+/")
    assert page.is_hidden("#help")
    page.keyboard.press("Shift+Escape")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    complete(page, 1)
    assert page.inner_text(".turn.user .prose") == "one\ntwo" and page.input_value("#message") == ""
    page.keyboard.press("ArrowUp")
    assert page.get_by_role("textbox", name="Message, edited").input_value() == "one\ntwo"
    page.keyboard.press("Escape")
    for keys, panel in (("Control+Shift+S", "history"), ("Control+,", "settings")):
        was = page.is_visible(f"#{panel}")
        page.keyboard.press(keys)
        assert page.is_visible(f"#{panel}") != was
        assert page.get_attribute(f"#{panel}-open", "aria-expanded") == str(not was).lower()
    page.keyboard.press("Control+Shift+O")
    assert page.locator(".turn").count() == 0 and page.evaluate("document.activeElement.id") == "message"
    new = opened(demo, view="talk", beside=page)
    assert new.is_hidden("#history") and new.is_visible("#settings"), "which panels are open survives, too"


def test_on_a_phone_panels_lie_over_the_conversation(demo: Running, opened: Open) -> None:
    page = opened(demo, PHONE, view="talk")
    for panel in ("history", "settings"):
        assert page.is_hidden(f"#{panel}")
        page.click(f"#{panel}-open")
        assert page.evaluate("document.activeElement.id") == f"{panel}-close"
        box = page.locator(f"#{panel}").bounding_box()
        assert box["height"] == PHONE["height"] and box["width"] < PHONE["width"]
        page.keyboard.press("Escape")
        assert page.is_hidden(f"#{panel}") and page.evaluate("document.activeElement.id") == f"{panel}-open"
    page.click("#history-open")
    page.mouse.click(PHONE["width"] - 8, 300)
    assert page.is_hidden("#history")


def test_the_field_grows_with_its_text(demo: Running, opened: Open) -> None:
    page = opened(demo, view="talk")
    heights = []
    for lines in (1, 4, 60):
        page.fill("#message", "\n".join(["line"] * lines))
        heights.append(page.locator("#message").bounding_box()["height"])
    assert heights[0] < heights[1] < heights[2] < 320
    page.fill("#message", "word " * 300)
    assert page.locator("#message").bounding_box()["height"] > heights[1]
    assert re.fullmatch(r"\d+", page.get_attribute("#message", "rows"))
