"""A limit on reasoning, as a grammar: when its tokens are used up, the only tokens allowed are those that end
it.

As a grammar it holds on each path of tokens that a step tries, and it forces the tokens that end the
reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from mtpserve.core.protocols.grammars import Grammar
from mtpserve.core.sampling import ThinkingBudget

Row = np.ndarray[Any, np.dtype[np.int32]]


class Phase(Enum):
    START = "start"  # the start tag may come
    THINKING = "thinking"
    CLOSING = "closing"  # the budget is used up
    ANSWER = "answer"


class ThinkingState(NamedTuple):
    phase: Phase
    num_tokens: int = 0  # tokens of reasoning; in CLOSING: closing tokens
    tail: bytes = b""  # the last bytes, in which a tag may have begun


class ThinkingBudgetMatcher:
    """core.protocols.grammars.Grammar: `inner` is the rest of the request's constraint, if there is any.

    `decode`: tokens to bytes, special tokens to their texts.
    """

    def __init__(
        self, budget: ThinkingBudget, decode: Callable[[list[int]], bytes], inner: Grammar | None
    ) -> None:
        self._budget, self._decode, self._inner = budget, decode, inner
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._state = self._thinking(0, b"") if budget.is_open else ThinkingState(Phase.START)

    def commit(self, tokens: Sequence[int]) -> None:
        state = self._walk(tokens)
        if state is None:
            raise ValueError(f"the thinking budget does not allow {list(tokens)} here")
        if self._inner is not None:
            self._inner.commit(tokens)
        self._state = state

    def masks(self, paths: Sequence[Sequence[int]], rows: Row) -> list[bool]:
        return [self._mask(path, row) for path, row in zip(paths, rows, strict=True)]

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        state = self._walk(path)
        if state is None:
            return []
        if state.phase is Phase.CLOSING:
            return list(self._budget.closing_ids[state.num_tokens :][:limit])
        return [] if self._inner is None else self._inner.forced(path, limit)

    def _mask(self, path: Sequence[int], row: Row) -> bool:
        row[:] = -1
        state = self._walk(path)
        if state is None:
            return False
        if state.phase is Phase.CLOSING:
            token = self._budget.closing_ids[state.num_tokens]
            row[:] = 0
            row.view(np.uint32)[token // 32] = 1 << token % 32
            return True
        return self._inner is None or self._inner.masks([path], row[None])[0]

    def _walk(self, tokens: Sequence[int]) -> ThinkingState | None:
        """The state after the output and `tokens`; None: they are not allowed."""
        state: ThinkingState | None = self._state
        for token in tokens:
            if state is None or state.phase is Phase.ANSWER:
                break
            state = self._next(state, token)
        return state

    def _next(self, state: ThinkingState, token: int) -> ThinkingState | None:
        if state.phase is Phase.CLOSING:
            closing_ids = self._budget.closing_ids
            if token != closing_ids[state.num_tokens]:
                return None
            num_tokens = state.num_tokens + 1
            return ThinkingState(
                Phase.ANSWER if num_tokens == len(closing_ids) else Phase.CLOSING, num_tokens
            )
        text = state.tail + self._decode([token])
        if state.phase is Phase.THINKING:
            return self._thinking(state.num_tokens + 1, text)
        text = text.lstrip()
        if text.startswith(self._start):
            return self._thinking(0, text[len(self._start) :])
        return ThinkingState(Phase.START if self._start.startswith(text) else Phase.ANSWER, 0, text)

    def _thinking(self, num_tokens: int, text: bytes) -> ThinkingState:
        if self._end in text:
            return ThinkingState(Phase.ANSWER)
        if num_tokens >= self._budget.num_tokens:
            return ThinkingState(Phase.CLOSING)
        return ThinkingState(Phase.THINKING, num_tokens, text[max(len(text) - len(self._end) + 1, 0) :])
