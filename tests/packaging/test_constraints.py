"""The versions that the Makefile installs: a pin that the oldest Python cannot take ends `make serve` there with a conflict."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata

import pytest
from packaging.specifiers import SpecifierSet

from tests.house.tree import ROOT

PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)


def test_every_pin_admits_the_oldest_python() -> None:
    """Its first release: distributions stay at one for years, and some packages ask for a later one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = re.fullmatch(r">=(\d+\.\d+)", project["requires-python"])
    assert oldest is not None
    found, refused = 0, list[str]()
    for name, version in PIN.findall((ROOT / "constraints.txt").read_text(encoding="utf-8")):
        try:
            installed = metadata(name)
        except PackageNotFoundError:  # for another machine
            continue
        if installed["Version"].partition("+")[0] != version.partition("+")[0]:
            continue
        asked = installed.get("Requires-Python")
        found += 1
        if asked and not SpecifierSet(asked).contains(f"{oldest[1]}.0"):
            refused.append(f"{name}: {asked}")
    if found <= 50:
        pytest.skip("other versions are installed")
    assert not refused, refused
