"""The tokenizer that grammars write forced text with. It spells every text in tokens that give the text back.

Where a grammar leaves one text, llguidance tokenizes that text and allows the first token alone. A
checkpoint's own tokenizer may give another text back: it reads the text of a special token as that token, or
it normalizes. The grammar would then refuse the only token that its mask allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

NEVER = r"(?!)"  # matches nothing


def grammar_tokenizer(source: str, vocab: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """`source`: a tokenizer.json, or its path. Raises Exception for one that llguidance cannot use."""
    eos = list(eos_ids) or None
    native = LLTokenizer(source, n_vocab=vocab, eos_token=eos, slices=[])  # it makes no masks
    return LLTokenizer(TokenizerWrapper(LosslessTokenizer(native, eos_ids)), n_vocab=vocab, eos_token=eos)


class LosslessTokenizer:
    """What TokenizerWrapper asks for. Special tokens are those of the file, and those that end a text: no
    forced text contains one."""

    def __init__(self, native: LLTokenizer, eos_ids: Sequence[int]) -> None:
        self._native = native
        ids = range(native.vocab_size)
        self.tokens = [native.decode_bytes([id]) for id in ids]
        self.special_token_ids = [id for id in ids if id in eos_ids or native.is_special_token(id)]
        self.eos_token_id, self.bos_token_id = native.eos_token, None
        self._special = frozenset(self.special_token_ids)
        self._splits = after_first_letter(
            {self.tokens[id].decode(errors="ignore") for id in self.special_token_ids} - {""}
        )

    def __call__(self, text: str) -> list[int]:
        return [id for piece in self._splits.split(text) for id in self._spelled(piece)]

    def _spelled(self, text: str) -> list[int]:
        ids = self._native.tokenize_str(text)
        if self._special.isdisjoint(ids) and self._native.decode_bytes(ids) == text.encode():
            return ids
        return self._native.greedy_tokenize(text)


def after_first_letter(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns where to cut a text so that no piece contains one of `texts` of two letters or more. The rest
    of a text whose beginning is written is then cut as the whole was."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    cuts = [f"(?<={re.escape(first)})(?={'|'.join(sorted(rest))})" for first, rest in sorted(rests.items())]
    return re.compile("|".join(cuts) or NEVER)
