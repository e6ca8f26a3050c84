"""The layers, by import-linter's contracts in pyproject.toml, and what may be at the top level."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT, sources

FOLDERS = {"mtpserve", "kernels", "configs", "tests", "benchmarks", "docker", "docs"}
FILES = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "constraints.txt",
    "mkdocs.yml",
    "setup.py",
}


def top_level() -> set[str]:
    """What git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {Path(line.strip('"')).parts[0] for line in listed}


def test_imports_go_downward() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_top_level_holds_nothing_else() -> None:
    assert {entry for entry in top_level() if not entry.startswith(".")} - FOLDERS - FILES == set()


def test_every_package_has_its_init() -> None:
    folders = {file.parent for file in (ROOT / "mtpserve").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_kernels_is_a_plain_folder() -> None:
    # An importable `kernels` would shadow the package of that name that transformers probes for.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_map_names_every_module() -> None:
    # An entry begins with `- **folder/**` at the start of a line; a module of the package itself has an entry of its own.
    written = (ROOT / "mtpserve" / "README.md").read_text(encoding="utf-8").replace(r"\_", "_")
    sections = dict(part.split("**", 1) for part in written.split("\n- **")[1:])
    modules = [file.relative_to(ROOT / "mtpserve") for file in sources(ROOT / "mtpserve") if file.name != "__init__.py"]
    missing = [str(file) for file in modules if str(file) not in sections and f"`{file.name}`" not in sections.get(f"{file.parent}/", "")]
    assert not missing
