"""The commands that README.md and docs/ show.

Fenced blocks of `sh`, `console` and `python` are run, unless a comment before the block names why not: `<!-- parsed: WHY -->`, where
commands are parsed as their programs do, or `<!-- skipped: WHY -->`, for other programs' commands. In README.md fences without a name are
`sh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mtpserve.cli.main import ALIASES, module_of
from mtpserve.cli.options import parsed_values, settings
from mtpserve.tools.bench.bench import BENCHMARKS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(r" *<!-- (parsed|skipped): (.+) -->")
FENCE = re.compile(r" *```(\w*)$")
OWN = re.compile(r"^(\.venv/bin/)?mtpserve\b")


@dataclass(frozen=True, slots=True)
class Block:
    place: str  # page:line
    language: str
    mode: str  # run, parsed or skipped
    text: str


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    mode, language = "run", ""
    for i, line in enumerate(lines):
        if (fence := FENCE.match(line)) is None:
            continue
        if opened is None:
            marker = MARKER.match(lines[i - 1])
            mode = marker[1] if marker else "run"
            opened, language = i, fence[1] or ("sh" if page.name == "README.md" else "text")
        else:
            indent = len(lines[opened]) - len(lines[opened].lstrip())
            text = "\n".join(each[indent:] for each in lines[opened + 1 : i])
            if language in ("sh", "console", "python"):
                yield Block(f"{page.name}:{opened + 1}", language, mode, text)
            opened = None


def whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quote is open
        return False
    return not text.endswith("\\")


def commands(block: Block) -> list[str]:
    """Commands over one or more lines. In `console` those after `$ `; what they print is left out."""
    found: list[str] = []
    pending = ""
    for line in block.text.splitlines():
        if not pending and block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        pending = f"{pending}\n{line}" if pending else line
        if whole(pending):
            found += [pending] if shlex.split(pending, comments=True) else []
            pending = ""
    assert not pending, f"{block.place}: {pending}"
    return found


def words(command: str) -> list[str]:
    """Of a command of mtpserve, without the program's name. `…` stands for more of the same."""
    return shlex.split(OWN.sub("", command.replace("\\\n", " ")).replace("…", "more"), comments=True)


def parse(arguments: list[str]) -> None:
    """As the program would: raises ConfigError."""
    name, rest = ALIASES.get(arguments[0], arguments[0]), arguments[1:]
    module = BENCHMARKS[rest[0]].split(":")[0] if name == "bench" else module_of(name)
    chosen = import_module(module).parser().parse(rest[1:] if name == "bench" else rest)
    if name == "launch":
        settings(parsed_values(chosen))


def inline(page: Path) -> list[str]:
    """Commands of mtpserve in `code` within tables."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [code for row in rows for code in re.findall(r"`(mtpserve [^`]+)`", row)]
