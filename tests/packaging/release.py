"""What a release says of itself must agree: its tag, the package's version, and the changelog's section.

python -m tests.packaging.release v0.1.0 [NOTES]     writes the section into the file NOTES; exit code 1 where they do not agree
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def notes(tag: str, root: Path = ROOT) -> str:
    """The changelog's section of the release. Raises SystemExit where the tag is not the package's version, or has no section."""
    found = VERSION.search((root / "mtpserve" / "__init__.py").read_text(encoding="utf-8"))
    version = found[1] if found else None
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, and mtpserve.__version__ is {version!r}: the tag must be v{version}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## \[{re.escape(version)}\].*\n(?P<text>[\s\S]*?)(?=^## |\Z)", changelog, re.MULTILINE)
    if section is None or not section["text"].strip():
        raise SystemExit(f"CHANGELOG.md has no section ## [{version}], or an empty one: name the lines of Unreleased so")
    return section["text"].strip() + "\n"


def main(tag: str, target: str | None = None) -> None:
    text = notes(tag)
    if target is not None:
        Path(target).write_text(text, encoding="utf-8")
    print(f"{tag} is the package's version, and the changelog has {len(text.splitlines())} lines of it")


if __name__ == "__main__":
    main(*sys.argv[1:])
