"""Docstrings are sentences or noun phrases. One that begins with a preposition or a pronoun is a fragment: it leaves out its subject."""

from __future__ import annotations

import ast
import re

from tests.house.tree import PACKAGE, name, sources, tree

# The number only ever falls. All that are left are in engine/depth.
FIRST_WORDS = {"Of", "As", "Whether", "Where", "With", "Those", "These", "In", "For"}


def docstrings(node: ast.AST) -> list[str]:
    """The docstring of this node alone, if it has one."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [text] if (text := ast.get_docstring(node)) else []


def test_docstrings_are_sentences() -> None:
    fragments = [
        f"{name(file)}: {text.splitlines()[0]}"
        for file in sources(PACKAGE)
        for node in ast.walk(tree(file))
        for text in docstrings(node)
        if (first := re.match(r"\w+", text)) is not None and first[0] in FIRST_WORDS
    ]
    assert not fragments
