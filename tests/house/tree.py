"""The source files that the house tests look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mtpserve"
KERNELS = ROOT / "kernels" / "mtpserve_kernels"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def lines(*folders: Path) -> Iterator[tuple[str, str]]:
    """("file:line", text) of every line."""
    return ((f"{name(file)}:{i}", line) for file in sources(*folders) for i, line in enumerate(text(file).splitlines(), 1))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(text(file))


def functions(file: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(file)) if isinstance(node, Function))
