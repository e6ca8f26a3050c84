"""A hook of mkdocs: files of the repository that a page links to, outside of docs/, are part of the site, below source/, with what they
link to in turn. So a link is the same on GitHub and in the site, all of them are checked, and none leads elsewhere. The footer names the
version, and has a link to the repository where the checkout has one with an address."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")  # not those with a scheme, nor those within a page
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
REMOTE = re.compile(r"(?:https://|(?:ssh://)?git@)(?P<host>[\w.-]+\.\w+)[:/](?P<name>[\w.-]+/[\w.-]+?)(?:\.git)?/?")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def repository(remote: str) -> str | None:
    """The web address of what `git remote` names. None: a folder, or an address with a user's name in it."""
    found = REMOTE.fullmatch(remote)
    return None if found is None else f"https://{found['host']}/{found['name']}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    found = VERSION.search((ROOT / "mtpserve" / "__init__.py").read_text(encoding="utf-8"))
    assert found is not None
    config.copyright = f"mtpserve {found[1]}"
    try:
        command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
        remote = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # a site can be built without git
        remote = ""
    if link := repository(remote):  # not repo_url, for which the theme's script asks GitHub for numbers
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": link, "name": "Repository"}]
    return config


def target(origin: str, link: str) -> str:
    """The place in the repository that a file at `origin` means."""
    return normpath(f"{Path(origin).parent.as_posix()}/{link}")


def in_site(place: str) -> str:
    """Where a place of the repository is among mkdocs' sources."""
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    if (ROOT / place).is_dir():
        place += "/README.md" if (ROOT / place / "README.md").exists() else "/index.md"
    return f"source/{place}"


def links(text: str) -> Iterator[str]:
    return (hit[2] for hit in LINK.finditer(FENCE.sub("", text)))


def file_of(place: str, config: MkDocsConfig) -> File:
    uri, path = in_site(place), ROOT / place
    if uri.endswith("/index.md"):
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        content = f"# {place}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
        return File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
    inner = path / "README.md" if path.is_dir() else path
    return File.generated(config, uri, abs_src_path=str(inner), inclusion=InclusionLevel.NOT_IN_NAV)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    todo = [(f"docs/{file.src_uri}", file) for file in files.documentation_pages()]
    while todo:
        origin, file = todo.pop()
        for link in links(file.content_string):
            place = target(origin, link)
            if place.startswith("docs/") or files.get_file_from_path(in_site(place)) or not (ROOT / place).exists():
                continue
            files.append(new := file_of(place, config))
            if new.is_documentation_page():
                todo.append((new.src_uri.removeprefix("source/"), new))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    origin = here.removeprefix("source/") if here.startswith("source/") else f"docs/{here}"

    def moved(hit: re.Match[str]) -> str:
        return hit[1] + relpath(in_site(target(origin, hit[2])), Path(here).parent.as_posix()) + hit[3]

    return LINK.sub(moved, markdown)
