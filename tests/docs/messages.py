"""Every text in the program's source, with `…` where a value stands: what a message in the documentation is compared with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.house.tree import KERNELS, PACKAGE, sources, tree

VALUE = re.compile(r"%(?:\.\d)?[dsgfr]|\{[\w.!:]*\}")  # of log lines and str.format


def texts(node: ast.AST) -> Iterator[str]:
    """The largest ones: a text is not looked into."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield "".join(next(texts(side), "…") for side in (node.left, node.right))
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring is said to nobody
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


@cache
def templates() -> frozenset[str]:
    return frozenset(VALUE.sub("…", text) for file in sources(PACKAGE, KERNELS) for text in texts(tree(file)) if len(text) > 8)


def is_said(message: str) -> bool:
    """Whether the program has a text with all parts of a message, in their order. `…` in the message is anything."""
    parts = [part.strip() for part in message.split("…") if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(template) for template in templates())
