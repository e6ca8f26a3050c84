"""How the page's Watch view uses the room that it has: panels in columns, charts, a phone's screen; in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.browsing import Open, Running, wait_for
from tests.server.test_page_watch import ask, until


@pytest.fixture
def busy(demo: Running) -> Running:
    """With something to show."""
    ask(demo, max_tokens=96)
    return demo


# Of the panels beside each other: how far the columns' ends are apart, and the most that a panel is higher than what it contains.
ENDS = """() => {
  const panels = [...document.querySelectorAll('#side > :not([hidden])')].map((each) => each.getBoundingClientRect()), ends = new Map();
  for (const { left, bottom } of panels) ends.set(left, Math.max(ends.get(left) ?? 0, bottom));
  const spare = [...document.querySelectorAll('#side > :not([hidden])')].map((each) => each.getBoundingClientRect().height - natural(each));
  const above = panels.some((one) => panels.some((other) =>
    one !== other && one.left === other.left && one.top < other.bottom - 0.5 && other.top < one.bottom - 0.5));
  return { columns: ends.size, apart: Math.max(...ends.values()) - Math.min(...ends.values()), spare: Math.max(...spare), above };
}"""


@pytest.mark.parametrize(("width", "columns"), [(1440, {2, 3}), (768, {2}), (390, {1})], ids=str)
def test_panels_fill_their_columns(busy: Running, opened: Open, width: int, columns: set[int]) -> None:
    """No holes, no panel over another one, and little room below what a panel contains; also after one was folded."""
    page = opened(busy, {"width": width, "height": 900}, view="watch")
    page.wait_for_selector("#positions tbody tr", state="attached")
    until(page, "timeline !== null")
    for fold in (False, True):
        if fold and width > 480:
            page.locator("#side summary").first.click()
        page.wait_for_timeout(100)
        found = page.evaluate(ENDS)
        assert found["columns"] in columns and found["apart"] < 1.5 and not found["above"]
        assert found["spare"] < 90, found
    heights = page.locator(".tiles .tile").evaluate_all(
        "(all) => all.map((each) => each.getBoundingClientRect().bottom - each.lastElementChild.getBoundingClientRect().bottom)"
    )
    if width > 480:
        assert max(heights) < 16, heights
        charts = page.locator("#charts figure").evaluate_all("(all) => all.map((each) => each.getBoundingClientRect().right)")
        assert len(charts) % len(set(charts)) == 0  # no place of the last row is empty


def test_plain_decoding_has_no_empty_panels(busy: Running, opened: Open) -> None:
    """Nothing that is of drafts alone; the four charts stand in twos, the other panels leave little room."""
    page = opened(busy, {"width": 1440, "height": 900}, view="watch")
    page.route("**/stats", lambda route: route.fulfill(json=plain(route.fetch().json())))
    wait_for("^plain decoding: no drafts$", page, "#length-note")
    page.reload()
    wait_for("^plain decoding: no drafts$", page, "#length-note")
    wait_for("peak", page, "#chart-rate .note")
    shown = page.locator(".fold:visible h2").all_inner_texts()
    assert shown == ["Latency", "Prefix cache, since start", "Engines", "Totals since start"]
    assert "drafts" not in page.inner_text("#totals")
    charts = page.locator("#charts figure").evaluate_all("(all) => all.map((each) => each.getBoundingClientRect().right)")
    assert len(charts) == 4 and len(set(charts)) == 2
    found = page.evaluate(ENDS)
    assert found["columns"] == 2 and found["apart"] < 1.5 and found["spare"] < 60, found


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """/stats of a server without drafts."""
    stats = body["stats"] | {"drafts_total": 0, "draft_tokens_by_source": {}, "draft_tokens_per_position": []}
    return body | {"speculative_steps": 0, "speculative_algorithm": None, "stats": stats}


def test_a_phone_shows_heads_and_two_charts(busy: Running, opened: Open) -> None:
    page = opened(busy, {"width": 390, "height": 844}, view="watch")
    wait_for("peak", page, "#chart-rate .note")
    assert page.locator(".fold[open] h2").all_inner_texts() == ["Accepted drafts by position"]
    assert page.locator("#charts figure:visible h2").all_inner_texts() == ["Tokens per second", "Acceptance length"]
    assert page.evaluate("document.documentElement.scrollHeight") < 2000
    page.click("#charts-all")
    assert page.locator("#charts figure:visible").count() == 6 and page.get_attribute("#charts-all", "aria-expanded") == "true"
    page.get_by_text("Engines", exact=True).click()
    assert page.is_visible("#engines")


def test_a_young_servers_charts_use_their_width(busy: Running, opened: Open) -> None:
    """As a server of 90 seconds would tell; and one whose history is full."""
    page = opened(busy, view="watch")
    wait_for("peak", page, "#chart-rate .note")

    def left(age: float, samples: int) -> float:
        page.evaluate(
            """([age, samples]) => {
                 const filled = (name) => Array.from({ length: samples }, (_, i) => name === "at" ? age - 2 * (samples - i) : 1);
                 const history = Object.fromEntries(Object.entries(timeline).map(([name, column]) =>
                   [name, Array.isArray(column) ? filled(name) : column]));
                 timeline = { ...history, now: age };
                 drawCharts(served);
               }""",
            [age, samples],
        )
        line = page.get_attribute("#chart-rate polyline", "points").split()
        axis = page.locator("#chart-rate .grid").first
        start, end = float(axis.get_attribute("x1")), float(axis.get_attribute("x2"))
        return (float(line[0].split(",")[0]) - start) / (end - start)

    page.route("**/stats*", lambda route: route.abort())  # nothing else comes
    page.route("**/stats/history*", lambda route: route.abort())
    assert left(90, 44) < 0.05
    assert page.get_attribute("#chart-rate svg", "aria-label").startswith("Tokens per second, the last 88 seconds: ")
    assert left(3600, 299) < 0.05
    assert page.get_attribute("#chart-rate svg", "aria-label").startswith("Tokens per second, the last 10 minutes: ")
    assert left(3600, 301) < 0.01
    assert page.get_attribute("#chart-rate svg", "aria-label").startswith("Tokens per second, the last ten minutes: ")
