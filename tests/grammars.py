"""A grammar of single tokens, for tests: what may follow is a function of the output."""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq
from typing import Any


class TokenGrammar:
    """core.protocols.grammars.Grammar, by `allowed`."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def allowed(self, output: Seq[int]) -> Collection[int]:
        raise NotImplementedError

    def accepts(self, path: Seq[int]) -> bool:
        return all(token in self.allowed([*self.output, *path[:i]]) for i, token in enumerate(path))

    def commit(self, tokens: Seq[int]) -> None:
        if not self.accepts(tokens):
            raise ValueError(f"{tokens} after {self.output}")
        self.output += tokens

    def masks(self, paths: Seq[Seq[int]], rows: Any) -> list[bool]:
        fits = [self.accepts(path) for path in paths]
        for row, path, good in zip(rows, paths, fits, strict=True):
            bits = sum(1 << token for token in self.allowed([*self.output, *path])) if good else -1
            row.view("uint32")[:] = [bits >> 32 * word & 0xFFFFFFFF for word in range(len(row))]
        return fits

    def forced(self, path: Seq[int], limit: int) -> list[int]:
        tokens: list[int] = []
        while self.accepts(path) and len(tokens) < limit and len(only := self.allowed([*self.output, *path, *tokens])) == 1:
            tokens += only
        return tokens
