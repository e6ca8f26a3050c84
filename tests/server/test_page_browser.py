"""The page in a real browser, against the real server with the demo model: what a person sees, presses and reads."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.browsing import NARROW, TOO_WIDE, UNFOLD, WIDE, Open, Running, launched, wait_for

PROMPT = "import os\n\ndef read_lines(path):"


@pytest.fixture
def server(demo: Running) -> Running:
    return demo


@pytest.fixture(scope="module")
def choosing(browser: Any) -> Iterator[Running]:
    yield from launched("--max-running-requests", "4")


@pytest.fixture
def mortal(browser: Any) -> Iterator[Running]:
    yield from launched(
        "--speculative-accept-threshold-single", "0.9", "--served-model-name", "organisation/a-long-name-of-a-model-0528-FP8"
    )


def generate(page: Any, *, tokens: int = 64, temperature: str = "0", prompt: str = PROMPT) -> None:
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(tokens))
    page.fill("#temperature", temperature)
    page.click("#send")
    page.wait_for_selector("#output[aria-busy=false] .t", timeout=60_000)


def classes(page: Any) -> Counter[str]:
    return Counter(page.evaluate("[...document.querySelectorAll('#output .t')].map((each) => each.className)"))


def test_tokens_come_in_the_colour_of_their_source(server: Running, opened: Open) -> None:
    before, page = server.stats(), opened(server)
    generate(page, tokens=96)
    seen, now = classes(page), server.stats()
    drafted = sum(count for name, count in seen.items() if "drafted" in name)
    assert drafted == now["accepted_tokens_total"] - before["accepted_tokens_total"] > 0
    assert sum(seen.values()) == now["generation_tokens_total"] - before["generation_tokens_total"]
    depths = [sum(count for name, count in seen.items() if f"d{depth}" in name.split()) for depth in (1, 2, 3)]
    accepted = [b - a for a, b in zip(before["accepted_tokens_per_position"], now["accepted_tokens_per_position"], strict=True)]
    assert depths == accepted[:3]
    assert depths[0] > depths[2] > 0
    assert seen["t own"] > 0
    body = {"prompt": PROMPT, "max_tokens": 96, "temperature": 0}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    assert page.text_content("#output") == answer["choices"][0]["text"]
    colours = page.evaluate(
        "['own', 'd1', 'd3'].map((each) => getComputedStyle(document.querySelector(`#output .t.${each}`)).backgroundColor)"
    )
    assert len(set(colours)) == 3
    legend = page.locator("#legend li")
    counts = {
        legend.nth(i).locator(".sample").get_attribute("class"): legend.nth(i).locator("b").inner_text() for i in range(legend.count())
    }
    assert {name.removeprefix("sample "): int(count) for name, count in counts.items() if count} == seen
    assert re.fullmatch(
        r"the limit was reached: 96 tokens in \d+ steps, [\d.]+ per step, first after \d+ ms, \d+ tokens/s", page.inner_text("#result")
    )


def test_numbers_are_the_servers(server: Running, opened: Open) -> None:
    page = opened(server)
    generate(page)
    page.click("#tab-watch")
    wait_for("last 10 s", page, "#length-note")
    stats = server.stats()
    lifetime = 1 + stats["accepted_tokens_total"] / stats["drafts_total"]
    wait_for(f"{lifetime:.2f} since start", page, "#length-note")
    assert 1 < float(page.inner_text("#length")) <= 9
    assert float(page.inner_text("#rate")) > 0
    assert page.inner_text("#waiting") == "0"
    assert re.fullmatch(r"0 of 1,024 pages of 16 tokens", page.inner_text("#pages-note"))
    assert re.search(r" · [1-9]\d* free pages can be reused$", page.inner_text("#cache-note"))
    rows = page.locator("#positions tbody tr").all_inner_texts()
    both = zip(stats["accepted_tokens_per_position"], stats["draft_tokens_per_position"], strict=True)
    shares = [round(100 * accepted / drafts) for accepted, drafts in both if drafts]
    assert [row.split("\t")[0].strip() for row in rows[:3]] == ["1", "2", "3"]
    assert all(abs(int(row.split()[-2]) - share) <= 1 for row, share in zip(rows, shares, strict=False))
    assert page.locator("#sources tbody tr").first.inner_text().split()[2] == f"{stats['draft_tokens_by_source']['mtp']:,}"


@pytest.mark.parametrize("width", [320, pytest.param(1280, marks=pytest.mark.thorough)])
def test_the_depth_and_what_it_follows_from(choosing: Running, opened: Open, width: int) -> None:
    page = opened(choosing, {"width": width, "height": 800})
    generate(page)
    page.click("#tab-watch")
    page.evaluate(UNFOLD)
    known = httpx.post(choosing.url + "/v1/spec", json={"num_steps": 2}).json()
    wait_for("^tokens ahead now, at most 2$", page, "#depth-most")
    assert re.fullmatch("[012]", page.inner_text("#depth"))
    wait_for(r"^[\d,]+ changes? · [\d,]+ test steps? · [\d,]+ tokens/s expected$", page, "#depth-note")
    shares = [row.split()[-2] for row in page.locator("#learned tbody tr").all_inner_texts()]
    assert shares == [f"{100 * rate:.0f}" for rate in known["acceptance"]]
    assert page.is_hidden("#costs")
    page.click("#costs-details summary")
    page.wait_for_selector("#costs tbody tr")
    rows = [row.split() for row in page.locator("#costs tbody tr").all_inner_texts()]
    kinds = {(f"{step['requests']:,}", f"{step['rows']:,}", f"{step['passes']:,}") for step in known["step_times"]}
    assert len(rows) == min(16, len(kinds)) and {tuple(row[:3]) for row in rows} <= kinds
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(TOO_WIDE) == []
    httpx.post(choosing.url + "/v1/spec", json={"num_steps": 3})


def test_a_fixed_depth_is_not_drawn(server: Running, opened: Open) -> None:
    page = opened(server, view="watch")
    wait_for(r"\d", page, "#rate")
    assert page.is_hidden("#depth-panel")


def test_views_by_key_and_by_address(server: Running, opened: Open) -> None:
    page = opened(server)
    tabs = ["talk", "text", "race", "watch"]

    def chosen() -> list[str]:
        shown = [name for name in tabs if page.is_visible("#view-" + name)]
        assert [page.get_attribute(f"#tab-{name}", "aria-selected") for name in shown] == ["true"]
        assert page.locator("[role=tab][tabindex='0']").count() == 1
        return shown

    assert chosen() == ["text"] and page.is_visible("#prompt") and page.is_hidden("#message")
    page.locator("#tab-talk").focus()
    for key, name in (
        ("ArrowRight", "text"),
        ("ArrowRight", "race"),
        ("End", "watch"),
        ("ArrowRight", "talk"),
        ("End", "watch"),
        ("Home", "talk"),
        ("ArrowLeft", "watch"),
    ):
        page.keyboard.press(key)
        page.wait_for_selector("#view-" + name)
        assert chosen() == [name] and page.evaluate("document.activeElement.id") == "tab-" + name
    page.go_back()
    page.wait_for_selector("#view-talk")
    assert chosen() == ["talk"]
    assert opened(server, view="watch").is_visible("#view-watch")


def test_grammar_and_markup(server: Running, opened: Open) -> None:
    page = opened(server)
    page.click("form summary")
    page.fill("#regex", r'<img src=x onerror="document\.title=1">[ab]{4}')
    page.fill("#prediction", "abab")
    generate(page)
    assert page.text_content("#output").startswith('<img src=x onerror="document.title=1">')
    assert page.locator("#output img").count() == 0
    assert page.title() == "demo – mtpserve"
    assert any("grammar" in name for name in classes(page))


def test_stopping_and_keys(server: Running, opened: Open) -> None:
    page = opened(server)
    page.fill("#max-tokens", "1500")
    for start, stop in (("click", "click"), ("Control+Enter", "Escape")):
        page.click("#send") if start == "click" else page.locator("#prompt").press(start)
        page.wait_for_selector("#output[aria-busy=true] .t")
        assert page.is_disabled("#send") and page.is_enabled("#stop")
        page.click("#stop") if stop == "click" else page.keyboard.press(stop)
        wait_for(r"^stopped: \d+ tokens", page, "#result")
        assert page.is_enabled("#send") and page.is_disabled("#stop")
    deadline = time.monotonic() + 10
    while server.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.stats()["running"] == 0
    page.locator("#prompt").focus()
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:7] == ["kind", "max-tokens", "temperature", "SUMMARY", "send", "show-rejected", "output"]


def test_a_refused_request_says_why(server: Running, opened: Open) -> None:
    page = opened(server)
    page.fill("#max-tokens", "100000")
    page.click("#send")
    page.wait_for_selector("#result.bad")
    assert "must be below the context of 2048" in page.inner_text("#result")
    assert page.get_attribute("#output", "data-empty") and page.text_content("#output") == ""


def test_a_key_is_asked_for_and_sent(server: Running, opened: Open) -> None:
    """As a gateway in front of the server would."""
    page = opened(server)
    assert page.is_hidden("#key")
    refused: list[str] = []

    def gateway(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=401, body="who are you?")

    page.route("**/v1/*", gateway)
    page.route("**/stats", gateway)
    wait_for("^key needed$", page, "#status")
    assert page.is_hidden("#trouble")
    assert page.evaluate("document.activeElement.id") == "key"
    for typed, note in (("wrong", "The server refuses this key."), ("secret", "")):
        page.fill("#key", typed)
        page.locator("#key").press("Enter")
        wait_for(f"^{note}$" if note else "^ready$", page, "#key-note" if note else "#status")
    assert page.is_hidden("#key-form")
    assert len(refused) == 2  # and not once a second, or a letter
    generate(page, tokens=8)
    page.reload()
    page.wait_for_selector("#status.ready")
    assert page.is_hidden("#key-form")


def test_a_loading_server_is_waited_for(server: Running, opened: Open) -> None:
    page = opened(server)
    loading = '{"error": {"message": "the model is loading", "type": "server_error", "param": null, "code": "overloaded"}}'
    page.route("**/stats", lambda route: route.fulfill(status=503, body=loading, content_type="application/json"))
    wait_for("^the model is loading$", page, "#status.loading")
    page.unroute("**/stats")
    page.wait_for_selector("#status.ready")


def test_rejected_drafts_stand_beside_the_text(server: Running, opened: Open) -> None:
    page = opened(server)
    generate(page)
    text = page.inner_text("#output")
    assert page.is_hidden("#misses")
    page.check("#show-rejected")
    assert page.inner_text("#output") == text and page.locator("#output del").count() == 0
    marked = page.locator("#output [data-instead]").count()
    assert marked == page.locator("#misses tbody tr").count() == page.locator("#misses del").count() > 0
    assert page.locator("#output [data-instead]").first.get_attribute("title").startswith("step ")


def test_a_lossy_server_says_so_and_a_dead_one_too(mortal: Running, opened: Open) -> None:
    page = opened(mortal, NARROW, view="watch")
    assert page.locator("#warnings .banner").all_inner_texts()[0].startswith("LOSSY")
    assert page.inner_text("#positions-empty").startswith("No drafts yet")
    assert page.is_hidden("#positions")
    page.goto(mortal.url + "/#text")
    page.fill("#max-tokens", "1500")
    page.click("#send")
    page.wait_for_selector("#output .t")
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
    os.kill(mortal.engine(), signal.SIGKILL)
    wait_for("^The engine is gone: the engine process was killed by SIGKILL", page, "#trouble")
    page.wait_for_selector("#result.bad")
    page.wait_for_selector("#status.unreachable", timeout=15_000)
    assert page.inner_text("#trouble").startswith("The engine is gone")
    assert "stale" in page.get_attribute("body", "class")


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_is_cut_off_at_either_width(choosing: Running, opened: Open, size: dict[str, int], scheme: str) -> None:
    page = opened(choosing, size, scheme)
    generate(page, tokens=128, temperature="0.6")
    page.click("#tab-watch")
    wait_for("last 10 s|since start|no drafts yet", page, "#length-note")
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    assert page.evaluate(TOO_WIDE) == []
