"""The page at `/docs` in a real browser, against the real server with the demo model: what a person opens, filters and copies."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import httpx
import pytest

from mtpserve.server.http.access import MANAGEMENT
from mtpserve.server.schema.texts import EXAMPLES
from tests.server.browsing import PHONE, WIDE, Open, Running, sound, wait_for

READY = "#routes[aria-busy=false]"
CHAT = "[id='post/v1/chat/completions']"


def called(command: str) -> httpx.Response:
    """What the command would ask of the server."""
    name, url, *rest = shlex.split(command.replace("\\\n", ""))
    assert name == "curl" and set(rest[::2]) <= {"-H", "-d"}
    options = list(zip(rest[::2], rest[1::2], strict=True))
    headers = dict(value.split(": ", 1) for option, value in options if option == "-H")
    data = next((value for option, value in options if option == "-d"), None)
    return httpx.request("GET" if data is None else "POST", url, headers=headers, content=data, timeout=60)


def test_routes_are_found_opened_and_copied(demo: Running, opened: Open) -> None:
    page = opened(demo, view="", path="/docs", ready=READY)
    document = httpx.get(demo.url + "/openapi.json").json()
    routes = [method + path for path, methods in document["paths"].items() for method in methods]
    shown = page.eval_on_selector_all("details.route", "all => all.map((each) => each.id)")
    assert sorted(shown) == sorted(routes)
    assert page.locator("section > h2").all_text_contents() == [tag["name"] for tag in document["tags"]]
    page.fill("#filter", "post top_k speculative")
    wait_for(r"^\d+ of", page, "#found")
    found = page.eval_on_selector_all("details.route:not([hidden])", "all => all.map((each) => each.id)")
    assert "post/v1/chat/completions" in found and "post/tokenize" not in found and "get/stats" not in found
    page.focus(f"{CHAT} summary")
    page.keyboard.press("Enter")
    temperature = page.locator(f"{CHAT} tr", has=page.locator("td:first-child code", has_text="temperature"))
    temperature.wait_for()
    schema = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    assert temperature.locator("td").all_text_contents() == ["temperature", "number", "≥ 0, ≤ 100", "", schema["description"]]
    page.locator(f"{CHAT} .below summary", has_text="ChatMessage").first.click()
    page.locator(f"{CHAT} .below td:first-child code", has_text="role").first.wait_for()
    assert called(page.text_content(f"{CHAT} > div > pre")).json()["choices"][0]["message"]["role"] == "assistant"
    page.goto(demo.url + "/#watch")
    page.click("footer a")
    page.wait_for_selector(READY)
    assert page.url == demo.url + "/docs"


# Nobody may set this server's depth, and its tokenizer is not shown; the others are operators' routes, which need their files.
UNASKED = {"post/v1/spec", "get/tokenizer_info", *(f"{method}{path}" for path in MANAGEMENT for method in ("get", "post"))}


def test_every_route_can_be_shown_and_every_command_without_an_id_works(demo: Running, opened: Open) -> None:
    """Commands with -X have no body that could be wrong."""
    page = opened(demo, view="", path="/docs", ready=READY)
    page.evaluate("document.querySelectorAll('details.route').forEach((each) => { each.open = true; })")
    page.wait_for_function("[...document.querySelectorAll('details.route')].every((each) => each.querySelector(':scope > div > pre'))")
    commands = page.eval_on_selector_all(
        "details.route", "all => all.map((each) => [each.id, each.querySelector(':scope > div > pre').textContent])"
    )
    for id, command in commands:
        if "{" not in id and "-X" not in command and id not in UNASKED:
            answer = called(command)
            assert answer.status_code == 200, (command, answer.text)
    assert "undefined" not in page.inner_text("main") and "[object" not in page.inner_text("main")


def sending(page: Any, route: str) -> Any:
    """The route's form, opened."""
    box = page.locator(f"[id='{route}']")
    box.locator("> summary").click()
    form = box.locator("form")
    form.wait_for()
    return form


def answered(form: Any) -> str:
    """The line with status, time and size."""
    form.locator(".said:text-matches('bytes|stopped|does not answer')").wait_for(timeout=60_000)
    return str(form.locator(".said").inner_text())


def test_a_request_is_changed_and_sent(demo: Running, opened: Open) -> None:
    page = opened(demo, view="", path="/docs", ready=READY)
    form = sending(page, "post/v1/completions")
    body = form.get_by_label("Body, JSON")
    assert json.loads(body.input_value()) == EXAMPLES["CompletionRequest"]
    changed = EXAMPLES["CompletionRequest"] | {"max_tokens": 5, "seed": 7}
    body.fill(json.dumps(changed))
    with page.expect_request("**/v1/completions") as heard:
        form.get_by_role("button", name="Send POST /v1/completions").click()
    assert heard.value.post_data_json == changed
    assert re.fullmatch(r"200 OK · [\d.]+ s · application/json · [\d,]+ bytes", answered(form))
    answer = json.loads(form.locator(".came pre").inner_text())
    assert answer["usage"]["completion_tokens"] == 5
    sent_by_curl = called(page.text_content("[id='post/v1/completions'] > div > pre")).json()
    assert sent_by_curl["choices"][0]["text"] == answer["choices"][0]["text"]
    form.get_by_role("button", name="Example again").click()
    assert json.loads(body.input_value()) == EXAMPLES["CompletionRequest"]
    body.fill('{"prompt": ')
    assert form.get_by_label("Stream the answer").is_disabled()
    form.get_by_role("button", name="Send").click()
    form.locator(".said.bad").wait_for()
    assert answered(form).startswith("400 Bad Request · ") and "JSON" in form.locator(".came pre").inner_text()


@pytest.mark.parametrize("route", ["post/v1/chat/completions", "post/v1/responses", "post/v1/messages", "post/generate"])
def test_a_streamed_answer_is_shown_as_it_comes(demo: Running, opened: Open, route: str) -> None:
    page = opened(demo, view="", path="/docs", ready=READY)
    form = sending(page, route)
    form.get_by_label("Stream the answer").check()
    body = json.loads(form.get_by_label("Body, JSON").input_value())
    assert body.pop("stream") is True
    long = {
        "post/v1/responses": {"max_output_tokens": 300},
        "post/generate": {"sampling_params": {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}},
    }.get(route, {"max_tokens": 300})
    greedy = body | ({"temperature": 0} if route != "post/generate" else {}) | long
    form.get_by_label("Body, JSON").fill(json.dumps(greedy | {"stream": True}))
    page.evaluate(
        """() => {
             window.grown = [];
             const heard = () => grown.push(document.querySelector('.came .text')?.textContent.length ?? 0);
             new MutationObserver(heard).observe(document.querySelector('.route[open] .came'), { childList: true, subtree: true });
           }"""
    )
    form.get_by_role("button", name="Send").click()
    assert re.search(r"^200 OK · [\d.]+ s · text/event-stream.* bytes · first after [\d.]+ s$", answered(form))
    text = form.locator(".came .text").text_content()
    whole = httpx.post(demo.url + route.removeprefix("post"), json=greedy, timeout=60).json()
    written = {
        "post/v1/chat/completions": lambda: whole["choices"][0]["message"]["content"],
        "post/v1/responses": lambda: whole["output"][0]["content"][0]["text"],
        "post/v1/messages": lambda: whole["content"][0]["text"],
        "post/generate": lambda: whole["text"],
    }[route]()
    assert text == written
    grown = page.evaluate("grown.filter((length) => length > 0)")
    assert len(set(grown)) > 2 and grown == sorted(grown)
    assert form.locator(".came pre").last.inner_text().startswith(("data: ", "event: "))


def test_parameters_are_sent_and_a_stream_is_stopped(demo: Running, opened: Open) -> None:
    page = opened(demo, view="", path="/docs", ready=READY)
    form = sending(page, "get/health")
    form.get_by_label("verbose, in the query").fill("true")
    form.get_by_role("button", name="Send").click()
    assert answered(form).startswith("200 OK")
    assert json.loads(form.locator(".came pre").inner_text()) == httpx.get(demo.url + "/health?verbose=true").json()
    assert "/health?verbose=true'" in page.text_content("[id='get/health'] > div > pre")
    form = sending(page, "get/v1/models/{id}")
    form.get_by_role("button", name="Send").click()
    assert form.locator(".said").inner_text() == ""  # the id is required
    form.get_by_label("id, in the path").fill("no/such model")
    form.get_by_role("button", name="Send").click()
    assert answered(form).startswith("404 Not Found") and "no/such model" in form.locator(".came pre").inner_text()
    form = sending(page, "get/")
    form.get_by_role("button", name="Send").click()
    assert answered(form).startswith("200 OK") and "<title>mtpserve</title>" in form.locator(".came pre").inner_text()
    form = sending(page, "post/v1/completions")
    form.get_by_label("Body, JSON").fill(json.dumps({"prompt": "import os", "max_tokens": 2000, "ignore_eos": True, "stream": True}))
    form.get_by_role("button", name="Send").click()
    form.locator(".came .text").wait_for()
    form.get_by_role("button", name="Stop").click()
    assert re.fullmatch(r"200 OK · stopped after [\d.]+ s", answered(form))
    assert form.get_by_role("button", name="Send").is_enabled() and form.get_by_role("button", name="Stop").is_disabled()


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_it_can_be_read_and_operated_everywhere(demo: Running, opened: Open, size: dict[str, int], scheme: str) -> None:
    page = opened(demo, size, scheme, "post/v1/chat/completions", "/docs", READY)
    page.wait_for_selector(f"{CHAT}[open] > div")
    page.evaluate("document.querySelectorAll('.route[open] details').forEach((each) => { each.open = true; })")
    page.wait_for_selector(f"{CHAT} .nested .nested")
    sound(page)
    page.click(f"{CHAT} .check")
    page.click(f"{CHAT} form .main")
    answered(page.locator(f"{CHAT} form"))
    sound(page)


def test_a_key_is_asked_for_when_the_document_needs_one(demo: Running, opened: Open) -> None:
    """Behind a proxy that offers the server under a path and asks for the key."""

    def proxied(route: Any) -> None:
        path = route.request.url.split("/models/one")[1]
        if path == "/openapi.json" and route.request.headers.get("authorization") != "Bearer secret":
            route.fulfill(status=401, json={"error": {"message": "a key is needed"}})
        else:
            route.fulfill(response=route.fetch(url=demo.url + path))

    page = opened(demo, view="", path="/docs", ready=READY)
    page.route("**/models/one/**", proxied)
    page.goto(demo.url + "/models/one/docs")
    page.wait_for_selector("#key-form:not([hidden])")
    assert page.locator("details.route").count() == 0
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    wait_for("refuses this key", page, "#key-note")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector(READY)
    page.click(f"{CHAT} summary")
    page.wait_for_selector(f"{CHAT} > div > pre")
    command = page.text_content(f"{CHAT} > div > pre")
    assert f"{demo.url}/models/one/v1/chat/completions" in command and "$MTPSERVE_API_KEY" in command and "secret" not in command
    with page.expect_request("**/models/one/v1/chat/completions") as sent:
        page.click(f"{CHAT} form .main")
    assert sent.value.headers["authorization"] == "Bearer secret"
    assert answered(page.locator(f"{CHAT} form")).startswith("200 OK")
