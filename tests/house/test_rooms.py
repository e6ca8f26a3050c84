"""The package's folders: small, without circles, with file names that say which one is meant."""

from __future__ import annotations

import ast
from collections import Counter

from tests.house.tree import PACKAGE, ROOT, name, sources, tree

MAX_FILES = 12
REGISTRIES = {"mtpserve/models"}  # a file for each family: they are alike, and nobody reads them in a row


def imports() -> dict[str, set[str]]:
    """Each module of the package → the modules of the package that it imports anywhere: in functions and for type checkers, too.

    The package itself is left out: its names are imported when they are used.
    """
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in sources(PACKAGE)}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        targets = set[str]()
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                targets |= {full if (full := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names}
        graph[module] = (targets & modules.keys()) - {module, "mtpserve"}
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached, stack = set[str](), [start]
    while stack:
        for module in graph[stack.pop()] - reached:
            reached.add(module)
            stack.append(module)
    return reached


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = imports()
    assert sum(map(len, graph.values())) > 1000
    assert not [module for module in graph if module in reachable(graph, module)]


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert [module for module in graph if module in reachable(graph, module)] == ["a", "b", "c"]


def test_a_folder_has_few_files() -> None:
    count = Counter(name(file.parent) for file in sources(PACKAGE) if file.name != "__init__.py")
    assert not {folder: number for folder, number in count.items() if number > MAX_FILES and folder not in REGISTRIES}


def test_a_file_name_occurs_once_in_a_room() -> None:
    count = Counter(
        (file.relative_to(PACKAGE).parts[0], file.name)
        for file in sources(PACKAGE)
        if file.name not in ("__init__.py", "__main__.py") and len(file.relative_to(PACKAGE).parts) > 1
    )
    assert not [place for place, number in count.items() if number > 1]


def test_every_room_says_what_it_is() -> None:
    empty = [name(file) for file in sources(PACKAGE) if file.name == "__init__.py" and not ast.get_docstring(tree(file))]
    assert not empty
