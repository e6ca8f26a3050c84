"""No class name occurs twice in the package: a name in a traceback, an import or a conversation means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house.tree import PACKAGE, name, sources, tree

# Still to be renamed, where they are; a name that is unique leaves this set.
TWICE = {"Experts", "Outcome", "Planned", "Sample"}


def test_no_class_name_occurs_twice() -> None:
    places = defaultdict(list)
    for file in sources(PACKAGE):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name(file)}:{node.lineno}")
    twice = {each: where for each, where in places.items() if len(where) > 1}
    assert set(twice) == TWICE, {each: where for each, where in twice.items() if each not in TWICE} or f"unique now: {TWICE - set(twice)}"
