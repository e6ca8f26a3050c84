"""No class name occurs twice in the package: a name in a traceback, an import or a conversation means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house.tree import PACKAGE, name, sources, tree


def test_no_class_name_occurs_twice() -> None:
    places = defaultdict(list)
    for file in sources(PACKAGE):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name(file)}:{node.lineno}")
    assert not {each: where for each, where in places.items() if len(where) > 1}
