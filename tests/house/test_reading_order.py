"""The files that mtpserve/README.md says to read first: few, short, and free of the side rooms' words."""

from __future__ import annotations

import re

import pytest

from tests.house.tree import PACKAGE, text

MAX_FILES = 22
MAX_LINES = 3_600
# The words of tiers, transfers, recurrent layers, compressed attention and trials: none of them occurs.
SIDE_WORDS = ("tier", "offload", "ring", "compressed", "probe", "lease")
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
SIDE_WORD = re.compile(rf"(?<![a-z])({'|'.join(SIDE_WORDS)})s?(?![a-z])", re.IGNORECASE)

ORDER = text(PACKAGE / "README.md").partition("## Reading order\n")[2].partition("\n## ")[0]
FILES = [PACKAGE / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`: \S", ORDER, re.MULTILINE)]


def side_words(source: str) -> list[str]:
    """Singular, lower case; identifiers such as `kv_lease` and `LeaseTable` are split into words."""
    return [match.group(1).lower() for match in SIDE_WORD.finditer(CAMEL.sub("_", source))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("string ringing released tierless", []),
        ("kv_lease, last_probe = leases", ["lease", "probe", "lease"]),
        ("class CompressedTier: ...  # its ring", ["compressed", "tier", "ring"]),
    ],
)
def test_the_search_finds_words_and_no_others(line: str, words: list[str]) -> None:
    assert side_words(line) == words


def test_the_list_is_short_and_its_files_exist() -> None:
    assert 15 <= len(FILES) <= MAX_FILES
    assert len(set(FILES)) == len(FILES) == len(re.findall(r"^\d+\.", ORDER, re.MULTILINE))
    assert [file for file in FILES if not file.is_file()] == []


def test_its_files_are_read_in_a_day() -> None:
    assert sum(len(text(file).splitlines()) for file in FILES) <= MAX_LINES


def test_side_rooms_stay_outside() -> None:
    found = {file.name: words for file in FILES if (words := side_words(text(file)))}
    assert not found
