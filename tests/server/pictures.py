"""The pictures of the page in docs/, and of which page they are.

`make pictures` lets tests write them; docs/pictures.json then has, for each, a hash of the files that its view is made of. A quick test
compares them, without a browser.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from pathlib import Path

from mtpserve.server.page.assembled import FILES

DOCS = Path(__file__).parents[2] / "docs"
RECORD = DOCS / "pictures.json"
# The files that are seen in one view alone, by the beginnings of their names. All others are seen in each.
ALONE = {"talk": ("talk.", "text.", "markdown.", "export."), "race": ("race.",), "watch": ("watch.", "charts.", "live.", "trees.")}


def parts(name: str, folder: Path) -> list[str]:
    """The file, and those that it, or such a file, names as {{name}}."""
    named = re.findall(r"\{\{([\w.]+)\}\}", (folder / name).read_text("utf-8"))
    return [name, *(part for each in named for part in parts(each, folder))]


def digest(view: str, folder: Path = FILES) -> str:
    """Of the files that are seen in this view."""
    others = tuple(start for other, starts in ALONE.items() if other != view for start in starts)
    found = hashlib.sha256()
    for name in sorted(set(parts("index.html", folder))):
        if not name.startswith(others):
            found.update(f"{name}\n".encode() + (folder / name).read_bytes())
    return found.hexdigest()[:16]


def pictures() -> list[Path]:
    return sorted(path for path in DOCS.glob("page-*") if path.suffix in (".png", ".gif"))


def view_of(picture: Path) -> str:
    return picture.name.split("-")[1]


def record(since: float) -> None:
    """Notes that the pictures which were written since then, in seconds of the epoch, are of the page as it is. Several processes may."""
    with RECORD.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        there = {picture.name for picture in pictures()}
        notes = {name: of for name, of in json.loads(file.read() or "{}").items() if name in there}
        notes |= {picture.name: digest(view_of(picture)) for picture in pictures() if picture.stat().st_mtime >= since}
        file.truncate(0)
        file.write(json.dumps(notes, indent=1, sort_keys=True) + "\n")


def stale() -> list[str]:
    """The pictures that are of another page."""
    notes = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    return [picture.name for picture in pictures() if notes.get(picture.name) != digest(view_of(picture))]
