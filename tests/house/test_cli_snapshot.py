"""Options and names are promises: one that goes or comes is seen in review, not by a user."""

from __future__ import annotations

import importlib.util

import pytest

import mtpserve
from tests.house.surface import SNAPSHOT, surface


def test_the_surface_is_the_one_agreed() -> None:
    assert surface() == SNAPSHOT.read_text(encoding="utf-8"), "if this is meant: make snapshot, and a line in CHANGELOG.md"


def test_every_exported_name_exists() -> None:
    if importlib.util.find_spec("mtpserve.llm") is None:
        pytest.skip("mtpserve.llm does not exist yet")
    assert [name for name in mtpserve.__all__ if not hasattr(mtpserve, name)] == []
