"""The page's Watch view in a real browser, against the real server with the demo model; its numbers' own tests are in test_watch.py.

MTPSERVE_SCREENSHOTS=1 also writes docs/page-watch-*.png. Skipped where playwright (the extra `browser`) or Chromium is not installed.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.browsing import ROOT, TOO_WIDE, UNFOLD, Open, Running, launched, wait_for

PROMPT = "import os\n\ndef read_lines(path):"
TREE = ["--no-speculative-adaptive", "--speculative-num-steps", "3", "--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", "8"]
CLOCK = r"\d\d:\d\d(:\d\d)?"
KEYS = ["--api-key", "user", "--admin-api-key", "admin"]


@pytest.fixture(scope="module")
def trees(browser: Any) -> Iterator[Running]:
    """With trees, and something in its history."""
    for running in launched(*TREE):
        for _ in range(2):
            ask(running, max_tokens=96)
        yield running


@pytest.fixture(scope="module")
def guarded(browser: Any) -> Iterator[Running]:
    """A chain of drafts whose depth is chosen, behind keys."""
    yield from launched("--max-running-requests", "4", *KEYS)


def ask(running: Running, key: str = "", **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0} | fields
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found: dict[str, Any] = httpx.post(running.url + "/v1/completions", json=body, headers=headers, timeout=120).json()
    return found


def table(page: Any, id: str) -> list[list[str]]:
    """A table's rows as the texts of their cells."""
    rows: list[list[str]] = page.evaluate(
        f"[...$('{id}').tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )
    return rows


def until(page: Any, expression: str) -> None:
    """Playwright's own wait evaluates a string in the page, which its policy forbids."""
    deadline = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


def stay_running(page: Any, url: str) -> None:
    """Every request lasts: a long one is held open by the page's own browser."""
    page.evaluate(
        """([url, body, key]) => {
             const headers = { "Content-Type": "application/json", Authorization: `Bearer ${key}` };
             fetch(url, { method: "POST", body, headers })
               .then((answer) => answer.json())
               .then((answer) => { window.ended = answer.choices[0].finish_reason; }); }""",
        [url + "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "rid": "a-long-one"}), "user"],
    )


def test_charts_have_scale_time_peak_and_words(trees: Running, opened: Open) -> None:
    page = opened(trees, view="watch")
    wait_for(r"peak [\d,.]+ at \d\d:\d\d", page, "#chart-rate .note")
    assert page.locator("#charts figure").count() == 6
    for figure in page.locator("#charts figure").all():
        title, words = figure.locator("h2").inner_text(), figure.locator("svg").get_attribute("aria-label")
        assert re.match(rf"{title}, the last (\d+ seconds|\d+ minutes?|ten minutes): ", words) and re.search("peak|nothing yet", words)
        assert figure.locator("svg").get_attribute("role") == "img"
        labels = figure.locator("svg text").all_text_contents()
        assert len([text for text in labels if re.fullmatch(CLOCK, text)]) >= 2
        assert len([text for text in labels if not re.fullmatch(CLOCK, text)]) >= 2
    kept = httpx.get(trees.url + "/stats/history").json()
    assert max(kept["tokens_per_second"]) > 0 and max(filter(None, kept["accept_length"])) > 1
    assert page.locator("#chart-rate polyline, #chart-rate .dot").count() > 0 and page.locator("#chart-rate .peak").count() == 1
    scale = [float(text.replace(",", "")) for text in page.locator("#chart-rate text[text-anchor=end]").all_text_contents()]
    assert scale[0] == 0 and scale[-1] >= max(kept["tokens_per_second"])


def test_history_survives_a_reload(trees: Running, opened: Open) -> None:
    page = opened(trees, view="watch")
    peak = max(httpx.get(trees.url + "/stats/history").json()["tokens_per_second"])
    wait_for("peak", page, "#chart-rate .note")
    page.reload()
    wait_for("peak", page, "#chart-rate .note")
    assert page.evaluate("Math.max(...timeline.tokens_per_second)") >= peak
    before = page.evaluate("timeline.at.length")
    until(page, f"timeline.at.length > {before}")
    times = page.evaluate("timeline.at")
    assert times == sorted(set(times))
    page.click("#minutes-details summary")
    page.wait_for_selector("#minutes tbody tr")
    assert page.locator("#minutes thead th").count() == 8
    assert re.fullmatch(r"\d\d:\d\d", table(page, "minutes")[0][0])


def test_percentiles_with_their_bounds(trees: Running, opened: Open) -> None:
    page = opened(trees, view="watch")
    page.wait_for_selector("#latency tbody tr")
    page.select_option("#latency-span", "since_start")
    until(page, "$('latency').tBodies[0].rows.length === 3")
    known = httpx.get(trees.url + "/stats").json()["latency"]
    rows = {row[0].split("\n")[0]: row for row in table(page, "latency")}
    assert list(rows) == ["First token", "Between tokens", "Whole request"]
    for name, row in zip(("first_token", "between_tokens", "whole_request"), rows.values(), strict=True):
        assert re.fullmatch(rf"[\s\S]+of {known[name]['since_start']['count']:,}", row[0])
        assert all(re.match(r"> |[\d.]+ m?s\s+[\d.]+( m?s)? – [\d.]+ m?s$", cell) for cell in row[1:])


def test_shares_name_what_they_are_shares_of(trees: Running, opened: Open) -> None:
    page = opened(trees, view="watch")
    page.wait_for_selector("#positions tbody tr")
    stats = trees.stats()
    drafts, accepted = stats["draft_tokens_per_position"], stats["accepted_tokens_per_position"]
    rows = table(page, "positions")
    assert rows
    for place, row in enumerate(rows):
        assert (row[0], row[3]) == (str(place + 1), f"{accepted[place]:,} of {drafts[place]:,}")
        assert not drafts[place] or abs(float(row[4].removesuffix(" %")) - 100 * accepted[place] / drafts[place]) <= 0.51
    assert page.inner_text("#positions-note").startswith(f"{stats['drafts_total']:,} steps with drafts")
    sources = {name: count for name, count in stats["draft_tokens_by_source"].items() if count}
    assert [row[1] for row in table(page, "sources")] == [f"{count:,}" for count in sources.values()]
    assert page.inner_text("#cache-unit") == f"of {stats['prompt_tokens_total']:,} prompt tokens found"
    found = {row[0]: row[2] for row in table(page, "cache")}
    cached = stats["cached_prompt_tokens_total"]
    assert found == {"Device memory": f"{cached:,}", "Not found": f"{stats['prompt_tokens_total'] - cached:,}"}
    assert [row[0] for row in table(page, "engines")] == ["0, up"] and page.inner_text("#engines-note") == "No engine has failed."


def test_tiers_and_lost_engines(trees: Running, opened: Open) -> None:
    """As a server with a cache below the device and two engines would tell of them."""
    page = opened(trees, view="watch")

    def changed(route: Any) -> None:
        answer = httpx.get(trees.url + "/stats").json()
        stats = answer["stats"] | {
            "prompt_tokens_total": 2000,
            "cached_prompt_tokens_total": 1000,
            "loaded_pages": {"host": 30, "disk": 10},
        }
        lost = answer["engines"][0] | {"engine": 1, "state": "starting", "restarts": 2, "reason": "killed by SIGKILL"}
        route.fulfill(
            status=200, content_type="application/json", body=json.dumps(answer | {"stats": stats, "engines": [answer["engines"][0], lost]})
        )

    page.route("**/stats", changed)
    wait_for("Engine 1 failed: killed by SIGKILL", page, "#engines-note")
    assert [(row[0], row[-1]) for row in table(page, "engines")] == [("0, up", "0"), ("1, starting", "2")]
    shares = [(row[0], *row[2:]) for row in table(page, "cache")]
    assert shares == [
        ("Device memory", "360", "18 %"),
        ("Host memory", "480", "24 %"),
        ("Disk", "160", "8 %"),
        ("Not found", "1,000", "50 %"),
    ]


@pytest.mark.parametrize("width", [320, pytest.param(1280, marks=pytest.mark.thorough)])
def test_trees_are_drawn_as_trees(trees: Running, opened: Open, width: int) -> None:
    page = opened(trees, {"width": width, "height": 800}, view="watch")
    answer = ask(trees, max_tokens=32, return_spec_trace=True)["choices"][0]["spec_trace"]
    page.evaluate(UNFOLD)
    page.locator("#trees-prompt").press("Tab")
    assert page.evaluate("document.activeElement.id") == "trees-kind"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "trees-send"
    page.keyboard.press("Enter")
    page.wait_for_selector("#trees svg", timeout=60_000)
    wait_for(f"^{len(answer)} steps", page, "#trees-note")
    steps = [(number, step) for number, step in enumerate(answer, 1) if step["proposed"]][-6:]
    blocks = page.locator("#trees > div")
    assert blocks.count() == len(steps) > 0
    assert any(len({node["parent"] for node in step["proposed"]}) < len(step["proposed"]) for _, step in steps)
    for block, (number, step) in zip(blocks.all(), steps, strict=True):
        taken = [node for node in step["proposed"] if node["accepted"]]
        assert block.locator("h3").inner_text() == f"Step {number}, a tree: {len(taken)} of {len(step['proposed'])} drafts accepted" or (
            "a chain" in block.locator("h3").inner_text()
        )
        for kind, count in (
            ("accepted", len(taken)),
            ("rejected", len(step["proposed"]) - len(taken)),
            ("own", len(step["tokens"]) - len(taken)),
        ):
            assert block.locator(f"g.{kind}").count() == block.locator(f"path.{kind}").count() == count
        # The chosen path is a straight line, and nothing covers anything else.
        heights = block.locator("g.start rect, g.accepted rect, g.own rect").evaluate_all(
            "(all) => all.map((each) => each.getAttribute('y'))"
        )
        assert len(set(heights)) == 1
        places = block.locator("g rect").evaluate_all("(all) => all.map((each) => each.getAttribute('x') + ',' + each.getAttribute('y'))")
        assert len(set(places)) == len(places)
        words = block.locator("svg").get_attribute("aria-label")
        assert words.count("accepted from") == len(taken) and words.count(" after “") == len(step["proposed"]) - len(taken)
    for scroll in page.locator("#trees .scroll").all():  # what is wider than the screen is reached by key
        if scroll.evaluate("(each) => each.scrollWidth > each.clientWidth + 1"):
            assert (
                scroll.get_attribute("tabindex") == "0" and scroll.get_attribute("role") == "region" and scroll.get_attribute("aria-label")
            )
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_live_requests_are_ended_with_the_admins_key(guarded: Running, opened: Open) -> None:
    page = opened_with_key(guarded, opened)
    stay_running(page, guarded.url)
    item = page.locator("#live li")
    page.wait_for_selector("#live li")
    assert item.locator(".id").inner_text() == "a-long-one"
    wait_for("^running · /v1/completions · for ", page, "#live .state")
    wait_for(r"prompt tokens.* · [\d,]+ written · [\d.]+ tokens per step, \d+ % of [\d,]+ drafts accepted$", page, "#live .note")
    assert PROMPT.split("\n")[0] not in page.inner_text("#view-watch section[aria-labelledby=live-title]")
    button = page.get_by_role("button", name="Abort request a-long-one")
    button.focus()
    written = page.inner_text("#live .note")
    until(page, f"document.querySelector('#live .note').textContent !== {json.dumps(written)}")
    assert page.evaluate("document.activeElement.textContent") == "Abort"  # what changes does not take the focus
    page.keyboard.press("Enter")
    page.wait_for_selector("#admin-form:visible")
    assert page.evaluate("document.activeElement.id") == "admin-key"
    page.fill("#admin-key", "wrong")
    page.keyboard.press("Enter")
    wait_for("^The server refuses this key.$", page, "#admin-note")
    if page.evaluate("window.ended"):  # on a fast machine: another one of the same name
        stay_running(page, guarded.url)
        page.wait_for_selector("#live li")
    page.fill("#admin-key", "admin")
    page.keyboard.press("Enter")
    wait_for("^a-long-one was ended.$", page, "#live-note")
    until(page, "window.ended === 'abort'")
    page.wait_for_selector("#live-empty:visible")
    assert page.is_hidden("#admin-form") and item.count() == 0


def opened_with_key(running: Running, opened: Open) -> Any:
    page = opened(running, view="watch", ready="#status:not(.loading)")
    page.fill("#key", "user")
    page.keyboard.press("Enter")
    page.wait_for_selector("#status.ready")
    return page


def test_the_policys_choices(guarded: Running, opened: Open) -> None:
    page = opened_with_key(guarded, opened)
    ask(guarded, "user", max_tokens=96)
    until(page, "$('depths').tBodies[0].rows.length === 4 && sum(timeline?.depth ?? []) > 0")
    known = httpx.get(guarded.url + "/v1/spec", headers={"Authorization": "Bearer user"}).json()
    most = f"{max(known['steps_per_depth']):,}"
    until(page, f"$('depths').tBodies[0].innerText.includes('{most}')")
    assert [row[0] for row in table(page, "depths")] == ["0", "1", "2", "3"]
    assert page.locator("#chart-depth polyline, #chart-depth .dot").count() > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width"), [("wide", 1280), ("narrow", 320)])
def test_nothing_is_cut_off(trees: Running, opened: Open, name: str, width: int, scheme: str) -> None:
    page = opened(trees, {"width": width, "height": 800}, scheme, view="watch")
    page.evaluate(UNFOLD)
    page.click("#trees-send")
    page.wait_for_selector("#trees svg", timeout=60_000)
    wait_for("peak", page, "#chart-rate .note")
    background = threading.Thread(
        target=ask, args=(trees,), kwargs={"max_tokens": 1900, "ignore_eos": True, "rid": "a-longer-name-of-a-request-0528"}
    )
    background.start()
    page.wait_for_selector("#live li")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(TOO_WIDE) == []
    small = "(each) => each.offsetHeight && each.offsetHeight < 24"
    assert (
        page.evaluate(f"[...document.querySelectorAll('#view-watch :is(button, select, summary)')].filter({small}).map((e) => e.id)") == []
    )
    httpx.post(trees.url + "/abort_request", json={"abort_all": True})
    background.join()
    if os.environ.get("MTPSERVE_SCREENSHOTS"):
        pictured(page, trees, name, scheme)


def pictured(page: Any, running: Running, name: str, scheme: str) -> None:
    """Half a minute of requests for the charts; a phone's picture is as it opens the page."""
    while len(httpx.get(running.url + "/stats/history").json()["at"]) < 15:
        ask(running, max_tokens=200, temperature=0.6)
        time.sleep(1)
    if name == "narrow":
        page.set_viewport_size({"width": 390, "height": 844})
        page.reload()
    page.evaluate("scrollTo(0, 0)")
    stay_running(page, running.url)
    wait_for("tokens per step", page, "#live .note")
    page.screenshot(path=ROOT / "docs" / f"page-watch-{name}-{scheme}.png", full_page=True)
    httpx.post(running.url + "/abort_request", json={"abort_all": True})
