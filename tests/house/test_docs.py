"""README and docs/: everything in them that can be looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mtpserve.cli.main import module_of
from mtpserve.cli.options import all_options
from mtpserve.tools.bench.bench import BENCHMARKS
from tests.house import reference, surface
from tests.house.tree import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
STEP, INTERNALS = ROOT / "docs" / "design.md", sorted((ROOT / "docs" / "internals").glob("*.md"))
OTHERS = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docker/README.md", "kernels/README.md", "mtpserve/README.md")
LINKING = [*PAGES, *(ROOT / name for name in OTHERS)]
STEP_LINES, PAGE_COLUMNS, SENTENCE_WORDS = 200, 140, 25  # readers may have another first language
FOREIGN = {"deploy", "faq", "http", "bench"}  # these name other programs' options; tests/docs/test_commands.py parses their commands


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [reference.OPTIONS, reference.OPERATING], ids=lambda page: page.name)
def test_tables_are_what_the_code_says(page: Path) -> None:
    assert read(page) == reference.renewed(read(page)), "make snapshot"


def test_every_option_and_metric_has_a_row() -> None:
    missing = [option.name for option in all_options() if f"| `--{option.spellings[0]}`" not in read(reference.OPTIONS)]
    names = [sample.name for family in reference.exported() for sample in family.samples]
    bare = {re.sub("_(bucket|count|sum)$", "", name) if f"{name}`" not in read(reference.OPERATING) else name for name in names}
    missing += [name for name in bare if f"| `{name}` |" not in read(reference.OPERATING)]
    assert not missing
    assert len(bare) > 60


def test_every_alert_has_a_row() -> None:
    groups = yaml.safe_load(read(ROOT / "docker" / "alerts.yaml"))["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"]]
    assert re.findall(r"^\| `(Mtpserve\w+)` \|", read(reference.OPERATING), re.MULTILINE) == alerts


def test_every_option_that_is_mentioned_exists() -> None:
    known = {name for option in all_options() for name in option.spellings} | {"config", "help"}
    known |= {f"no-{name}" for option in all_options() if option.kind is bool for name in option.spellings}
    commands = [module_of(command) for command in ("inspect", "generate", "prove", "replay", "experts")]
    for module in (*commands, *(place.split(":")[0] for place in BENCHMARKS.values())):
        known |= {name.removeprefix("--") for line in surface.options(module) for name in line.split()}
    others = {"keep-mtp", "merge", "no-deps"}  # of python -m …, llama-gguf-split and pip
    unknown = {}
    for page in (ROOT / "README.md", *(page for page in PAGES if page.stem not in FOREIGN)):
        for name in re.findall(r"`(?:mtpserve \w+ )?--([a-z-]+)", read(page)):
            if name not in known | others and not any(option.startswith(name) for option in known):
                unknown[name] = page.name
    assert not unknown


def test_every_file_that_is_linked_exists() -> None:
    """Anchors are checked where the site is made."""
    for page in LINKING:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"(?s)```.*?^ *```", "", read(page), flags=re.MULTILINE)):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def sentences(text: str) -> Iterator[str]:
    """Of paragraphs and list items; fences, tables, headings and the targets of links are left out."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```|^(?:\||#).*?$", "", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", re.sub(r"\]\([^)]*\)", "]", prose)):
        yield from re.split(r"(?<=[.!?])[*)\"]*\s+(?=[^a-z\s])", re.sub(r"^\s*(?:-|\d+\.) ", "", paragraph))


@pytest.mark.parametrize("page", [STEP, *INTERNALS], ids=lambda page: page.stem)
def test_the_design_is_in_short_sentences(page: Path) -> None:
    long = [" ".join(each.split()) for each in sentences(read(page)) if len(re.findall(r"\S*\w\S*", each)) > SENTENCE_WORDS]
    long += [line for line in read(page).splitlines() if len(line) > PAGE_COLUMNS and not line.startswith("|")]
    assert not long


def test_the_step_is_one_short_page_and_names_the_others() -> None:
    assert len(read(STEP).splitlines()) <= STEP_LINES
    assert [page.name for page in INTERNALS if f"(internals/{page.name})" not in read(STEP)] == []


def test_every_fence_says_what_is_in_it() -> None:
    """Those of shell commands are run or parsed by tests/docs/test_commands.py."""
    for page in PAGES:
        opened = re.findall(r"^ *```(.*)$", read(page), re.MULTILINE)[::2]
        assert set(opened) <= {"sh", "console", "python", "json", "toml", "text", "yaml"}, page.name
