"""Numbers with their nouns, as messages have them."""

from __future__ import annotations

import pytest

from mtpserve.core.errors import quantity


@pytest.mark.parametrize(("number", "text"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests"), (1000, "1,000 requests")])
def test_one_is_singular(number: int, text: str) -> None:
    assert quantity(number, "request") == text
