"""What the tests of the page share: the server with the demo model, a browser, and what is asked of every view.

Tests that use `browser` are skipped where playwright (the extra `browser`) or Chromium is not installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = ["--model", "demo", "--speculative-algorithm", "MTP+NGRAM", "--port", "0", "--max-total-tokens", "16384"]
QUIET = ["quic", "background-networking", "component-update", "sync", "gpu"]
FLAGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in QUIET)]
WIDE, NARROW, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 800}, {"width": 320, "height": 700}
DESK, TABLET = {"width": 1440, "height": 900}, {"width": 768, "height": 1024}
Open = Callable[..., Any]

# What the page does after a time, such as its next look at the server, it does after a quarter of it.
TIMEOUT_SCRIPT = "const later = window.setTimeout; window.setTimeout = (work, after, ...rest) => later(work, after / 4, ...rest);"

# Elements whose content is wider than they are; those that scroll are meant to be.
TOO_WIDE = """() => [...document.querySelectorAll('main *')].filter((each) => each.clientWidth && each.scrollWidth > each.clientWidth + 1
  && getComputedStyle(each).overflowX === 'visible').map((each) => each.id || each.className || each.tagName)"""

# A narrow screen shows the heads of Watch's sections: opens them, and shows all charts.
UNFOLD = """() => {
  for (const each of document.querySelectorAll('.fold')) each.open = true;
  if (getComputedStyle(document.getElementById('charts-all')).display !== 'none') document.getElementById('charts-all').click();
}"""

# Controls that are seen and smaller than 24 px; a label counts with its field, and links in a sentence are exempt (WCAG 2.5.8).
TOO_SMALL = """() => [...document.querySelectorAll('button, input, select, textarea, summary, [role=tab]')].filter((each) => {
  const box = (each.closest('label') || each).getBoundingClientRect();
  return each.checkVisibility() && !each.disabled && (box.width < 24 || box.height < 24);
}).map((each) => each.id || each.textContent)"""

# Texts whose contrast to what is behind them is below WCAG's 4.5, by the colours that the browser computed; colours may be mixed.
TOO_PALE = """() => {
  const pen = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const over = (colour, ground) => {
    pen.fillStyle = `rgb(${ground.join(' ')})`; pen.fillRect(0, 0, 1, 1);
    pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((all, c, i) => all + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    const path = [];
    for (let each = node; each; each = each.parentElement) path.unshift(getComputedStyle(each).backgroundColor);
    return path.reduce((ground, colour) => over(colour, ground), [255, 255, 255]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), poor = new Set();
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility({ opacityProperty: true })) continue;
    if (node.closest('script, style, option, :disabled')) continue;
    const ground = behind(node), light = [luminance(over(getComputedStyle(node).color, ground)), luminance(ground)];
    const [high, low] = light.sort((a, b) => b - a), ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.add(`${node.tagName} ${node.id || node.className}: ${ratio.toFixed(2)}`);
  }
  return [...poor];
}"""


# What the page reads of an answer: its first parts, and no end.
ENDLESS = """
(path) => {
    const real = window.fetch;
    window.fetch = async (url, options) => {
        const response = await real(url, options);
        if (!new URL(url, location).pathname.endsWith(path)) return response;
        // The same beginning, in whatever parts it comes: some tokens, and no end.
        let room = 8000;
        const first = {
            transform: (part, to) => { if (room > 0) to.enqueue(part.subarray(0, room)); room -= part.length; },
            flush: () => new Promise(() => {}),
        };
        return new Response(response.body.pipeThrough(new TransformStream(first)), response);
    };
}
"""


class Running:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def stats(self) -> dict[str, Any]:
        return httpx.get(self.url + "/stats").json()["stats"]

    def engine(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])


def launched(*options: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "mtpserve", "launch", *OPTIONS, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"is ready: (http://\S+)", process.stdout.readline())
            assert found
            yield Running(process, found[1])
        finally:
            process.kill()


@pytest.fixture(scope="session")
def chromium() -> str:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the extra `browser` brings it")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Of one module: while it is open, its thread has a running event loop, which other modules' tests cannot have."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def demo(chromium: str) -> Iterator[Running]:
    """With a template, so that it can be talked to. What it drafts does not depend on how fast this machine is."""
    yield from launched("--no-speculative-adaptive", "--chat-template", "mtpserve/demo/comments.jinja")


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens the page; whatever its script throws, or its policy forbids, fails the test at its end."""
    complaints: list[str] = []
    pages = []

    def open(
        running: Running,
        size: dict[str, int] = WIDE,
        scheme: str = "light",
        view: str = "text",
        path: str = "/",
        ready: str = "#status.ready",
        beside: Any = None,
    ) -> Any:
        """`beside`: a page whose browser, with what it keeps, opens this one, too."""
        page = (browser.new_context(viewport=size, color_scheme=scheme) if beside is None else beside.context).new_page()
        page.set_default_timeout(60_000)
        pages.append(page)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" and "load resource" not in said.text else None)
        page.add_init_script(TIMEOUT_SCRIPT)
        page.goto(f"{running.url}{path}#{view}")
        page.wait_for_selector(ready)
        return page

    yield open
    for context in {page.context for page in pages}:
        context.close()
    assert not complaints


def never_ending(page: Any, path: str) -> None:
    """Answers go on until the page stops them, however slow it is. The server's ends with all tokens that it may have."""
    page.evaluate(ENDLESS, path)
    page.route(f"**{path}", lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True})))


def wait_for(text: str, page: Any, selector: str) -> None:
    page.wait_for_selector(f"{selector}:text-matches({text!r})", timeout=60_000)


def sound(page: Any) -> None:
    """Nothing is cut off, too small to hit or too pale to read, and every control has a name."""
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate(TOO_SMALL) == []
    assert page.evaluate(TOO_PALE) == []
    tree = page.locator("body").aria_snapshot()
    assert not re.findall(r"^ *- (?:button|textbox|spinbutton|combobox|checkbox|radio|tab|link):?$", tree, re.MULTILINE)
