"""The mutations fit the sources and the changelog, so that the list does not rot. `python -m tests.mutations` tries them."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutations.catalogue import ROOT, Mutation, mutations

LEAST = 70


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def changelog() -> str:
    return words((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_a_mutation_fits_its_file(mutation: Mutation, changelog: str) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    changed = mutation.applied(text)
    assert changed != text
    if mutation.file.endswith(".py"):
        ast.parse(changed)
    assert words(mutation.changelog) in changelog
    assert mutation.tests
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")


def test_there_are_many_and_their_names_are_unique() -> None:
    names = Counter(mutation.name for mutation in mutations())
    assert len(names) >= LEAST
    assert names.most_common(1)[0][1] == 1
