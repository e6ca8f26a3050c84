"""A thinking budget as a grammar, against a count over the text."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from mtpserve.core.sampling import ThinkingBudget
from mtpserve.text.grammars.thinking_budget import ThinkingBudgetMatcher

PIECES = ["a", "<think>", "</think>", "</", "think>", "<", " ", "b c", "\n", "é"]
CLOSING = (3, 4)  # the end tag in two tokens


def decode(ids: list[int]) -> bytes:
    return "".join(PIECES[id] for id in ids).encode()


def matcher(num_tokens: int, is_open: bool) -> ThinkingBudgetMatcher:
    return ThinkingBudgetMatcher(ThinkingBudget(num_tokens, "<think>", "</think>", CLOSING, is_open), decode, None)


def allowed(grammar: ThinkingBudgetMatcher, path: list[int]) -> set[int] | None:
    row = np.zeros((1, 1), dtype=np.int32)
    known = grammar.masks([path], row)[0]
    return {id for id in range(len(PIECES)) if row[0, 0] >> id & 1} if known else None


def expected(num_tokens: int, is_open: bool, tokens: list[int]) -> set[int]:
    """By reading the whole text: the reasoning's tokens are those after which its end has not come yet."""
    every = set(range(len(PIECES)))
    start = 0
    if not is_open:
        for start in range(len(tokens) + 1):
            text = decode(tokens[:start]).lstrip()
            if text.startswith(b"<think>"):
                break
            if not b"<think>".startswith(text):
                return every
        else:
            return every
    closing = 0
    for end in range(start, len(tokens) + 1):
        thought = decode(tokens[:end]) if is_open else decode(tokens[:end]).lstrip()[len("<think>") :]
        if b"</think>" in thought:
            return every
        if end - start == num_tokens:
            closing = len(tokens) - end
            return every if closing >= len(CLOSING) else {CLOSING[closing]}
    return every


@pytest.mark.parametrize("seed", range(40))
def test_masks_are_those_of_a_count_over_the_text(seed: int) -> None:
    random = Random(seed)
    num_tokens, is_open = random.randrange(6), random.random() < 0.5
    grammar, tokens = matcher(num_tokens, is_open), list[int]()
    for _ in range(14):
        path: list[int] = []
        for _ in range(4):  # a path of drafts from here; what it did is taken back
            choices = allowed(grammar, path)
            assert choices == expected(num_tokens, is_open, tokens + path)
            forced = grammar.forced(path, 9)
            assert forced == ([] if len(choices) > 1 else list(CLOSING[CLOSING.index(next(iter(choices))) :]))
            path.append(random.choice(sorted(choices)))
        taken = path[: random.randrange(1, 4)]
        grammar.commit(taken)
        tokens += taken


def test_what_the_budget_does_not_allow_is_refused_and_leaves_no_trace() -> None:
    grammar = matcher(1, True)
    grammar.commit([0])
    assert allowed(grammar, [0]) is None and grammar.forced([0], 4) == [] and allowed(grammar, []) == {3}
    with pytest.raises(ValueError, match="thinking budget"):
        grammar.commit([0])
    grammar.commit([3, 4, 0])
    assert allowed(grammar, []) == set(range(len(PIECES)))
