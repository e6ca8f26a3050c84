"""The pictures in docs/ are of the page as it is."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from mtpserve.server.page.assembled import FILES
from tests.server import pictures


@pytest.mark.skipif("MTPSERVE_SCREENSHOTS" in os.environ, reason="this run writes them")
def test_no_picture_is_older_than_the_page() -> None:
    stale = pictures.stale()
    assert not stale, f"the page has changed since these were made, renew them with `make pictures`: {', '.join(stale)}"


def test_the_documentation_shows_them() -> None:
    texts = "".join(path.read_text("utf-8") for path in [*pictures.DOCS.glob("*.md"), pictures.DOCS.parent / "README.md"])
    assert set(re.findall(r"\bpage-[\w-]+\.(?:png|gif)", texts)) <= {picture.name for picture in pictures.pictures()}
    assert {pictures.view_of(picture) for picture in pictures.pictures()} == set(pictures.ALONE)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FILES, tmp_path / "files"))


@pytest.mark.parametrize(
    ("file", "views"), [("race.css", {"race"}), ("charts.js", {"watch"}), ("base.js", {"talk", "race", "watch"}), ("docs.js", set())]
)
def test_a_change_concerns_the_views_that_show_it(copied: Path, file: str, views: set[str]) -> None:
    before = {view: pictures.digest(view, copied) for view in pictures.ALONE}
    (copied / file).write_text((copied / file).read_text("utf-8") + "\n", "utf-8")
    assert {view for view in pictures.ALONE if pictures.digest(view, copied) != before[view]} == views


def test_what_is_written_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    monkeypatch.setattr(pictures, "RECORD", tmp_path / "pictures.json")
    for name, at in (("page-race-wide.png", 100), ("page-talk-wide.png", 50), ("other.png", 100)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    assert pictures.stale() == ["page-race-wide.png", "page-talk-wide.png"]
    pictures.record(since=80)
    assert pictures.stale() == ["page-talk-wide.png"]
    pictures.record(since=40)
    assert pictures.stale() == []
    (tmp_path / "page-race-wide.png").unlink()
    pictures.record(since=1000)
    assert list(json.loads((tmp_path / "pictures.json").read_text())) == ["page-talk-wide.png"]
