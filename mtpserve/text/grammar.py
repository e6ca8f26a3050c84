"""What an output must look like, as masks over tokens. A thin wrapper around llguidance; it samples nothing and sees no logits.

llguidance and not xgrammar: one wheel without dependencies, where xgrammar brings torch and a compiler's runtime along; and its
matcher takes tokens back one by one, which is what a rejected draft needs.

JSON is written on one line, with a space behind each colon and comma: with the free whitespace that JSON allows, a model that samples
can fill its whole budget with blanks, and no token between two values is ever forced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from mtpserve.core.errors import InvalidRequest, LoadError
from mtpserve.core.sampling import GrammarSpec
from mtpserve.text.structural import JSON_LAYOUT, structural_grammar

FIELDS = {"json_object": "response_format", "json_schema": "response_format", "structural_tag": "response_format"}
# Compiling is milliseconds; these bound what one request can make it cost.
LIMITS = LLParserLimits(max_grammar_size=200_000, max_lexer_states=100_000, verbose_errors=False)

Row = np.ndarray[Any, np.dtype[np.int32]]


class GrammarCompiler:
    """`vocab` is the model's: tokens that the tokenizer does not know are never allowed. Raises LoadError for a tokenizer it cannot use."""

    def __init__(self, tokenizer: str | Path, vocab: int, eos_ids: Sequence[int]) -> None:
        path = Path(tokenizer) / "tokenizer.json"
        try:
            self._tokenizer = LLTokenizer(str(path), n_vocab=vocab, eos_token=list(eos_ids) or None)
        except Exception as error:
            raise LoadError(f"{path}: not usable for grammars: {error}") from error
        self._vocab, self._eos = vocab, tuple(eos_ids)

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Raises InvalidRequest that names the field and the reason."""
        field = FIELDS.get(spec.kind, spec.kind)
        try:
            matcher = LLMatcher(self._tokenizer, source(spec), log_level=0, limits=LIMITS)
            reason = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # whatever the library thinks of it, it is the request's fault and no one else's
            reason = str(error) or type(error).__name__
        if reason:
            raise InvalidRequest(f"{field}: {spec.kind} is not usable: {' '.join(reason.split())[:500]}", field)
        return GrammarMatcher(matcher, self._vocab, self._eos)


def source(spec: GrammarSpec) -> str:
    """In llguidance's own language. Raises ValueError."""
    if spec.kind == "json_object":
        return json_grammar({"type": "object"})
    if spec.kind == "json_schema":
        schema = json.loads(spec.text)
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a schema is an object, got {spec.text[:50]}")
        return json_grammar(schema if isinstance(schema, dict) else {} if schema else {"not": {}})
    if spec.kind == "choice":
        choices = json.loads(spec.text)
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise ValueError("choices are a list of strings, none of them empty, at least one")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))
    if spec.kind == "structural_tag":
        return structural_grammar(json.loads(spec.text))
    if not spec.text.strip():
        raise ValueError("it is empty")
    if spec.kind == "regex":
        # \d is a digit of ASCII, as every client means it.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.text, use_ascii='d')}/")
    return grammar_from("ebnf", spec.text)


def json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_LAYOUT)


class GrammarMatcher:
    """core.protocols.Grammar: the state behind the output that is committed. Paths are tried from there and taken back."""

    def __init__(self, matcher: LLMatcher, vocab: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._eos = frozenset(eos_ids)
        self._ended = False  # an end-of-text token is committed: nothing but another one may follow

    def commit(self, tokens: Sequence[int]) -> None:
        """The output grew. Raises ValueError for tokens that are not allowed."""
        taken = self._take(tokens)
        if taken is None:
            raise ValueError(f"the grammar does not allow {list(tokens)} here")
        self._ended = self._ended or any(token in self._eos for token in tokens)

    @property
    def complete(self) -> bool:
        """The output may end here."""
        return self._ended or bool(self._matcher.is_accepting())

    def masks(self, paths: Sequence[Sequence[int]], rows: Row) -> list[bool]:
        """See core.protocols.Grammar."""
        return [self.mask(path, row) for path, row in zip(paths, rows, strict=True)]

    def mask(self, path: Sequence[int], row: Row) -> bool:
        taken = self._take(path)
        if taken is None:
            row[:] = -1
            return False
        if self._ended or any(token in self._eos for token in path) or self._matcher.is_stopped():
            row[:] = 0
            self._allow(row, self._eos)
        else:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_accepting():
                self._allow(row, self._eos)
        self._matcher.rollback(taken)
        return True

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """The tokens behind `path` about which there is no choice, at most `limit`."""
        taken = self._take(path)
        if taken is None:
            return []
        stopped = self._ended or any(token in self._eos for token in path) or self._matcher.is_stopped()
        found = [] if stopped or self._matcher.is_accepting() else self._matcher.compute_ff_tokens()[:limit]
        self._matcher.rollback(taken)
        return found

    def _take(self, tokens: Sequence[int]) -> int | None:
        """Move on by `tokens` → how many the matcher itself took; None, and nothing moved: they are not allowed."""
        body = list(tokens)
        ended = self._ended
        for place, token in enumerate(tokens):
            if token in self._eos:
                body = body[:place]
                ended = True
                break
        rest = tokens[len(body) :]
        if (self._ended and body) or any(token not in self._eos for token in rest):
            return None
        if self._matcher.validate_tokens(body) < len(body):
            return None
        if body and not self._matcher.consume_tokens(body):
            return None
        if ended and not self._ended and not self._matcher.is_accepting():
            self._matcher.rollback(len(body))
            return None
        return len(body)

    def _allow(self, row: Row, tokens: frozenset[int]) -> None:
        words = row.view(np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << (token % 32))
