"""What tests of the page's conversation share: answers in the server's form, a message and its answer, buttons, settings."""

from __future__ import annotations

import json
import re
from typing import Any


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
    settings(page, max_tokens=tokens)
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


def settings(page: Any, **values: object) -> None:
    """Opens the panel, fills its fields, and closes it as it was."""
    was_hidden = page.is_hidden("#settings")
    if was_hidden:
        page.click("#settings-open")
    for name, value in values.items():
        page.fill("#system" if name == "system" else f"#talk-{name.replace('_', '-')}", str(value))
    if was_hidden:
        page.click("#settings-close")
