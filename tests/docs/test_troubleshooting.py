"""docs/troubleshooting.md quotes what the program says, and names metrics and codes that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtpserve.server.http import errors
from tests.docs.messages import is_said
from tests.docs.shown import ROOT
from tests.house import reference

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
# Quoted in the first column, and no message: routes, and what a client or the system says.
OTHERS = {"/server_info", '"kernels":"reference"', "/v1/v1/…", "/chat/completions", "shutting_down", "engine_dead"}
QUOTED = [quoted for row in ROWS for quoted in re.findall(r"`([^`]+)`", row[0]) if quoted not in OTHERS]


def test_there_are_many() -> None:
    assert len(ROWS) > 30
    assert len(QUOTED) > 20
    assert all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize("message", QUOTED)
def test_the_program_says_so(message: str) -> None:
    assert is_said(message)


def test_a_message_that_nobody_says_is_noticed() -> None:
    assert not is_said("the … is on fire")
    assert not is_said("finds no GPU … --device cuda: torch")  # the parts in another order
    assert not is_said("What a documentation's message is compared with")  # a docstring


def test_codes_and_metrics_exist() -> None:
    source = Path(errors.__file__).read_text(encoding="utf-8")
    assert all(f'"{code}"' in source for code in re.findall(r"code `(\w+)`", PAGE))
    exported = {re.sub("_(bucket|count|sum)$", "", sample.name) for family in reference.exported() for sample in family.samples}
    assert set(re.findall(r"`(mtpserve_\w+)`", PAGE)) <= exported
