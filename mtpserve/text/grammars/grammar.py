"""Constrained output: masks over tokens from grammars. A thin wrapper around llguidance; it samples nothing
and sees no logits.

llguidance and not xgrammar: it is one wheel without dependencies, while xgrammar depends on torch and a
compiler's runtime; and its matcher can take back any number of tokens, so that several continuations can be
tried from one state.

JSON is written on one line, with one space after each colon and comma: with the free whitespace that JSON
allows, a model that samples can fill its whole budget with blanks, and no token between two values is ever
forced.

Clients write grammars, and two kinds of them are not covered by llguidance's limits: it recurses, so that a
chain of a thousand `$ref`s overflows an ordinary stack and ends the process, and a few characters
(`multipleOf`) can compile for minutes. So each grammar is compiled in its own thread, with a deadline and
with a stack large enough for the longest source that is accepted. Compiled grammars are not cached: copies of
a matcher share its lexer and its limits, so one request could exhaust another's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from mtpserve.core.errors import InvalidRequest, LoadError
from mtpserve.core.gguf import SUFFIX
from mtpserve.core.protocols.grammars import Grammar
from mtpserve.core.sampling import GrammarSpec
from mtpserve.text.gguf import fast_tokenizer
from mtpserve.text.grammars.compile_threads import COMPILE_SECONDS, CompileThreads
from mtpserve.text.grammars.grammar_source import source
from mtpserve.text.grammars.grammar_tokenizer import grammar_tokenizer
from mtpserve.text.grammars.schema_faults import SchemaFault, find_fault, plain_reason
from mtpserve.text.grammars.thinking_budget import ThinkingBudgetMatcher

FIELDS = {
    "json_object": "response_format",
    "json_schema": "response_format",
    "structural_tag": "response_format",
    "tool_calls": "tools",
}
LIMITS = LLParserLimits(max_grammar_size=200_000, max_lexer_states=100_000, verbose_errors=False)
MAX_SOURCE = {"regex": 64 << 10, "ebnf": 64 << 10}
MAX_JSON_SOURCE = 256 << 10

Row = np.ndarray[Any, np.dtype[np.int32]]


class LLGuidanceCompiler:
    """core.protocols.GrammarCompiler. `tokenizer` is a directory or a GGUF file. `vocab` is the model's:
    tokens that the tokenizer does not know are never allowed.

    Raises LoadError for a tokenizer that llguidance cannot use.
    """

    def __init__(self, tokenizer: str | Path, vocab: int, eos_ids: Sequence[int]) -> None:
        path = Path(tokenizer)
        if path.suffix != SUFFIX:
            path /= "tokenizer.json"
        try:
            file = fast_tokenizer(path).to_str() if path.suffix == SUFFIX else str(path)
            self._tokenizer = grammar_tokenizer(file, vocab, eos_ids)
        except Exception as error:
            raise LoadError(f"{path}: not usable for grammars: {error}") from error
        self._vocab, self._eos = vocab, tuple(eos_ids)
        self._threads = CompileThreads()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequest, EngineBusy: see `matcher`."""
        if (budget := spec.thinking) is None:
            return self.matcher(spec)
        inner = None if spec.kind == "any_text" else self.matcher(spec)
        return ThinkingBudgetMatcher(budget, self._tokenizer.decode_bytes, inner)

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        """Raises InvalidRequest with the field and the reason; EngineBusy while grammars of other requests
        hold up the compiler."""
        field = spec.field or FIELDS.get(spec.kind, spec.kind)
        longest = MAX_SOURCE.get(spec.kind, MAX_JSON_SOURCE)
        # a list of choices is flat, however long it is
        if len(spec.text) > longest and spec.kind != "choice":
            raise InvalidRequest(
                f"{field}: {spec.kind} has {len(spec.text)} characters, at most {longest} are compiled", field
            )
        if len(spec.instead) > MAX_JSON_SOURCE:
            raise InvalidRequest(
                f"tools make a grammar of {len(spec.instead)} characters, at most {MAX_JSON_SOURCE} "
                f"are compiled",
                "tools",
            )
        results: list[LLMatcher | str] = []
        self._threads.run(lambda: results.append(self._matcher(spec)))
        # Read once: an abandoned thread may still append.
        result = results[0] if results else f"it takes longer than {COMPILE_SECONDS:g} s to compile"
        if isinstance(result, str):
            raise InvalidRequest(f"{field}: {spec.kind} is not usable: {result[:500]}", field)
        return GrammarMatcher(result, self._vocab, self._eos)

    def _matcher(self, spec: GrammarSpec) -> LLMatcher | str:
        """The grammar's matcher, or the reason why there is none."""
        result = self._compiled(spec)
        if not isinstance(result, str):
            return result
        faults: list[SchemaFault | None] = [None]
        if spec.kind == "json_schema":
            with contextlib.suppress(Exception):  # no JSON, or no object
                find_fault(json.loads(spec.text), faults)
        if faults[-1] is not None:
            return str(faults[-1])
        return one_line(result) if spec.kind == "ebnf" else plain_reason(result)

    def _compiled(self, spec: GrammarSpec) -> LLMatcher | str:
        try:
            matcher = LLMatcher(self._tokenizer, source(spec), log_level=0, limits=LIMITS)
            # That a grammar fits nothing, begins with itself or exceeds the limits may show only with the
            # first mask.
            starts = b"" if matcher.is_error() else matcher.compute_bitmask()
            reasons = (str(matcher.stop_reason()), str(matcher.get_error())) if matcher.is_error() else ()
            if reasons and not any(reason.startswith("NoExtension") for reason in reasons):
                return reasons[1]
            return matcher if any(starts) and not reasons else "nothing fits it"
        # a Rust panic is not an Exception; the error ends this request and no other
        except BaseException as error:
            return str(error) or type(error).__name__


def one_line(text: str) -> str:
    return " ".join(text.split("<backtrace>")[0].replace("<non-verbose/>", "").split())


class GrammarMatcher:
    """core.protocols.grammars.Grammar: the state after the committed output. Paths are tried from there and
    taken back."""

    def __init__(self, matcher: LLMatcher, vocab: int, eos_ids: Sequence[int]) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._eos = frozenset(eos_ids)
        self._ended = False  # an end-of-text token is committed: nothing but another one may follow

    @property
    def failure(self) -> str | None:
        """The error if this grammar exceeded the library's limits. From then on only the end of the text is
        allowed and every commit is accepted: the step is shared with other requests and must not fail."""
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def commit(self, tokens: Sequence[int]) -> None:
        """Advances by tokens that were added to the output. Raises ValueError for tokens that are not
        allowed, and does not advance."""
        taken = self._take(tokens)
        if taken is None and not self._matcher.is_error():
            raise ValueError(f"the grammar does not allow {list(tokens)} here")
        self._ended = self._ended or any(token in self._eos for token in tokens)

    @property
    def complete(self) -> bool:
        """The output may end here."""
        return not self._matcher.is_error() and (self._ended or bool(self._matcher.is_accepting()))

    def masks(self, paths: Sequence[Sequence[int]], rows: Row) -> list[bool]:
        """See core.protocols.grammars.Grammar. One path at a time: walking it is cheap compared with filling
        its row."""
        return [self.mask(path, row) for path, row in zip(paths, rows, strict=True)]

    def mask(self, path: Sequence[int], row: Row) -> bool:
        assert row.flags.c_contiguous  # the library writes through a pointer
        taken = 0 if self._matcher.is_error() and not path else self._take(path)
        if taken is None:
            row[:] = -1
            return False
        stopped = self._stopped(path)
        if not stopped:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if stopped or self._matcher.is_error():
            row[:] = 0
        ends = stopped or self._matcher.is_error() or self._matcher.is_accepting()
        # a client's grammar may name a token that ends texts: it ends this one, so it must be at its end
        self._set(row, self._eos, ends)
        self._back(taken)
        return True

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """The tokens after `path` that are the only ones allowed, at most `limit`."""
        taken = self._take(path)
        if taken is None:
            return []
        tokens = (
            []
            if self._stopped(path) or self._matcher.is_accepting()
            else self._matcher.compute_ff_tokens()[:limit]
        )
        self._back(taken)
        return tokens

    def _stopped(self, path: Sequence[int]) -> bool:
        return self._ended or self._matcher.is_stopped() or any(token in self._eos for token in path)

    def _take(self, tokens: Sequence[int]) -> int | None:
        """Advances by `tokens` → how many the matcher consumed; None if they are not allowed: then it does
        not advance."""
        body = list(takewhile(lambda token: token not in self._eos, tokens))
        rest = tokens[len(body) :]
        if (
            self._matcher.is_error()
            or (self._ended and body)
            or any(token not in self._eos for token in rest)
        ):
            return None
        taken = self._matcher.try_consume_tokens(body)
        if self._matcher.is_error():
            return None
        if taken == len(body) and (not rest or self._ended or self._matcher.is_accepting()):
            return taken
        self._back(taken)
        return None

    def _back(self, taken: int) -> None:
        if not self._matcher.is_error():
            self._matcher.rollback(taken)

    def _set(self, row: Row, tokens: frozenset[int], allowed: bool) -> None:
        words = row.view(np.uint32)
        for token in tokens:
            bit = np.uint32(1 << (token % 32))
            words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
