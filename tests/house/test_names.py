"""Names: a class name occurs once in the package, so that it means one thing in a traceback; names are nouns."""

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


# Participles and pronouns that stand alone: nobody can search for them. The number only ever falls: the one
# that is left is a key of a JSON file.
BARE_NAMES = {"made", "found", "given", "each", "own", "kept", "chosen", "known", "asked", "told", "most"}
MAX_BARE_NAMES = 1


def bound_names(node: ast.AST) -> list[str]:
    """What this node alone gives a name to."""
    match node:
        case ast.Name(id=bound, ctx=ast.Store()) | ast.arg(arg=bound) | ast.Attribute(attr=bound, ctx=ast.Store()):
            return [bound]
        case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
            return [bound]
    return []


def test_names_are_nouns() -> None:
    bare = [
        f"{name(file)}: {bound}"
        for file in sources(PACKAGE)
        for node in ast.walk(tree(file))
        for bound in bound_names(node)
        if bound.strip("_") in BARE_NAMES
    ]
    assert len(bare) <= MAX_BARE_NAMES, bare
