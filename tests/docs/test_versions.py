"""docs/versions.md says what pyproject.toml, constraints.txt, the workflows and the kernels' compile matrix say."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from mtpserve_kernels.cpu.build import INSTRUCTION_SETS
from packaging.requirements import Requirement

from tests.docs.shown import ROOT
from tests.kernels.compiled import TARGETS
from tests.kernels.matrix import FLOAT8
from tests.packaging.wheels import NEWEST_LIBC

PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")


def rows(name: str) -> list[list[str]]:
    block = re.search(rf"<!-- versions: {name} -->\n(.*?)<!-- end of {name} -->", PAGE, re.DOTALL)
    assert block is not None, name
    lines = [line for line in block[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["triton"])]
    ranges = {each.name: {str(part) for part in each.specifier} for each in named}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    python, *packages = rows("packages")
    assert python[:2] == ["Python", project["requires-python"]]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert python[2].split(", ") == workflow["jobs"]["install"]["strategy"]["matrix"]["python"]
    assert len(packages) >= 10
    for name, said, tested in packages:
        assert set(said.split(",")) == ranges[name], name
        assert tested == pins[name], name


def test_gpus() -> None:
    found = rows("gpus")
    assert [row[0] for row in found] == list(TARGETS)
    assert {row[0] for row in found if row[2] == "kept"} == set(FLOAT8)


def test_cpus() -> None:
    assert rows("cpus") == [[f"`{isa.name}`", isa.machine, ", ".join(sorted(isa.needs))] for isa in INSTRUCTION_SETS]


def test_the_oldest_system_of_the_wheels() -> None:
    assert f"glibc {NEWEST_LIBC[0]}.{NEWEST_LIBC[1]} or newer" in PAGE


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_package_that_changes_often_has_an_upper_bound(name: str) -> None:
    (said,) = [row[1] for row in rows("packages") if row[0] == name]
    assert "<" in said
