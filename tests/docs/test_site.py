"""The site of docs/, as `make docs` builds it: every link and anchor leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import mtpserve

ROOT = Path(__file__).parents[2]
LOADED = {"script": ("src",), "link": ("href",), "img": ("src", "srcset"), "source": ("src", "srcset"), "iframe": ("src",)}

pytestmark = pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed: the extra `docs`")


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


def tags(page: Path) -> list[tuple[str, dict[str, str]]]:
    parser = Tags()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def loaded(page: Path) -> Iterator[str]:
    for tag, attributes in tags(page):
        yield from (attributes[name] for name in LOADED.get(tag, ()) if name in attributes)


def test_every_page_of_docs_is_there(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    missing = [str(page) for page in pages if not (site / page.with_suffix(".html")).is_file()]
    assert not missing
    assert not (site / "site.py").exists()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 15
    for page in pages:
        for address in loaded(page):
            parts = urlsplit(address)
            assert not parts.scheme and not parts.netloc, f"{page.name} loads {address}"
            assert (page.parent / unquote(parts.path)).is_file(), f"{page.name}: {address} is not there"
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_every_link_within_the_site_leads_to_a_file_and_an_anchor(site: Path) -> None:
    """What mkdocs checks in Markdown, once more in what it has written, files of the repository included."""
    anchors = {page: {each for _, found in tags(page) for each in (found.get("id"), found.get("name"))} for page in site.rglob("*.html")}
    for page in anchors:
        for tag, attributes in tags(page):
            parts = urlsplit(attributes.get("href", ""))
            if tag != "a" or parts.scheme or parts.netloc or page.name == "404.html":
                continue
            place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert place.exists(), f"{page.name}: {attributes['href']}"
            if parts.fragment and place in anchors:
                assert unquote(parts.fragment) in anchors[place], f"{page.name}: {attributes['href']}"


def test_search_works_where_a_page_is_opened_from_a_file(site: Path) -> None:
    """There a page may start no worker and fetch no index: an iframe takes the worker's part, and the index is a script."""
    index = json.loads((site / "search" / "search_index.js").read_text(encoding="utf-8").removeprefix("var __index = "))
    assert {"start.html", "troubleshooting.html"} <= {entry["location"] for entry in index["docs"]}
    for page in (site / "start.html", site / "internals" / "cpu.html"):
        (shim,) = [address for address in loaded(page) if "iframe-worker" in address]
        assert 'location.protocol==="file:"&&(window.Worker=' in (page.parent / shim).read_text(encoding="utf-8")


def test_the_footer_names_the_version(site: Path) -> None:
    assert f"mtpserve {mtpserve.__version__}" in (site / "start.html").read_text(encoding="utf-8").split("<footer", 1)[1]


@pytest.mark.parametrize(
    ("remote", "link"),
    [
        ("https://example.org/group/mtpserve.git", "https://example.org/group/mtpserve"),
        ("https://example.org/group/mtpserve", "https://example.org/group/mtpserve"),
        ("git@example.org:group/mtpserve.git", "https://example.org/group/mtpserve"),
        ("ssh://git@example.org/group/mtpserve.git", "https://example.org/group/mtpserve"),
        ("https://user:secret@example.org/group/mtpserve.git", None),
        ("/home/somebody/mtpserve", None),
        ("", None),
    ],
)
def test_the_repository_is_where_the_checkout_comes_from(remote: str, link: str | None) -> None:
    assert runpy.run_path(str(ROOT / "docs" / "site.py"))["repository"](remote) == link


def test_a_link_to_nowhere_fails(tmp_path: Path) -> None:
    broken = tmp_path / "docs"
    broken.mkdir()
    (broken / "index.md").write_text("# One\n\n[there](#nowhere)\n")
    text = (ROOT / "mkdocs.yml").read_text().split("nav:\n")[0]
    config = tmp_path / "mkdocs.yml"
    config.write_text(text.replace("docs_dir: docs", f"docs_dir: {broken}").replace("docs/site.py", str(ROOT / "docs" / "site.py")))
    done = build(tmp_path / "site", "--config-file", str(config))
    assert done.returncode != 0
    assert "a link '#nowhere', but there is no such anchor" in done.stderr
