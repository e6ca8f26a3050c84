"""The examples of CONTRIBUTING.md, docs/examples/*.diff: each applies to the repository, touches few files, and passes its own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

DIFFS = sorted((ROOT / "docs" / "examples").glob("*.diff"))
MAX_SOURCES = {"drafter": 3, "family": 2, "sampling-field": 5}  # files of mtpserve/
PARTS = ("mtpserve", "kernels", "tests")
CHANGED = re.compile(r"^\+\+\+ b/(\S+\.py)$", re.MULTILINE)
ADDED = re.compile(r"^--- /dev/null\n\+\+\+ b/(\S+\.py)$", re.MULTILINE)


def changed(diff: Path, folder: str, pattern: re.Pattern[str] = CHANGED) -> list[str]:
    return [file for file in pattern.findall(diff.read_text(encoding="utf-8")) if file.startswith(f"{folder}/")]


def run(folder: Path, *command: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "kernels")]),
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    environment = {name: value for name, value in environment.items() if not name.startswith(("GIT_DIR", "GIT_WORK_TREE", "PYTEST_"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contributing_names_each() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {diff.stem for diff in DIFFS} == MAX_SOURCES.keys()
    assert [diff.name for diff in DIFFS if f"(docs/examples/{diff.name})" not in text] == []


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_it_is_small_and_brings_a_test(diff: Path) -> None:
    assert 0 < len(changed(diff, "mtpserve")) <= MAX_SOURCES[diff.stem]
    assert changed(diff, "tests", ADDED)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_it_applies_and_its_tests_pass(diff: Path, copy: Path) -> None:
    run(copy, "git", "apply", str(diff))
    files = [*changed(diff, "mtpserve"), *changed(diff, "tests")]
    assert all((copy / file).is_file() for file in files)
    ruff = Path(sys.executable).with_name("ruff")
    if ruff.exists():
        run(copy, str(ruff), "format", "--no-cache", "--check", *files)
        run(copy, str(ruff), "check", "--no-cache", *changed(diff, "mtpserve", ADDED), *changed(diff, "tests", ADDED))
    run(copy, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *changed(diff, "tests", ADDED))
