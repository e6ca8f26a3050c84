"""The seam between the grammar of a request's output and the steps that follow it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy import ndarray

    from mtpserve.core.sampling import GrammarSpec


class Grammar(Protocol):
    """What one request's output must look like: a state over its tokens."""

    def commit(self, tokens: Seq[int]) -> None:
        """The output grew. Raises ValueError for tokens that are not allowed."""
        ...

    def masks(self, paths: Seq[Seq[int]], rows: ndarray[Any, Any]) -> list[bool]:
        """What may follow each path after the output: bit j of word i of its row is token 32 i + j. rows [n,
        words] int32.

        False for a path that is itself not allowed; its row is then all ones.
        """
        ...

    def forced(self, path: Seq[int], limit: int) -> list[int]:
        """The tokens after `path` about which there is no choice, at most `limit`."""
        ...


class GrammarCompiler(Protocol):
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequest."""
        ...
