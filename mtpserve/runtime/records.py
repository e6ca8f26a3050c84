"""What the host's side of a runner knows of the request in each seat: what its admission says, and what its results said since.

A step keeps the records of its spans until it is read, not their seats: by then a seat may be another request's.
"""

from __future__ import annotations

from mtpserve.core.plan import Admission
from mtpserve.core.protocols.grammars import Grammar


class Record:
    """One request, from its admission on."""

    def __init__(self, admission: Admission) -> None:
        params = admission.sampling
        self.admission, self.sampling, self.seat, self.id = admission, params, admission.seat, admission.id
        self.prompt_len, self.depth, self.plain = admission.prompt_len, admission.depth, admission.plain
        self.tokens = list(admission.tokens)  # as far as results were read
        self.grammar: Grammar | None = None  # knows the first `grammar_tokens` of the output
        self.grammar_tokens = 0
        self.error: str | None = None  # why it cannot be computed
        self.words = tuple(tuple(word) for word in admission.bad_words if len(word) > 1)
        self.asks_bias = bool(params.logit_bias or params.allowed_token_ids or len(self.words) < len(admission.bad_words))
        self.asks_penalty = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self.always_rules = bool(self.asks_bias or self.asks_penalty or self.words or params.grammar)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def waits(self) -> bool:
        """It may not end yet, as far as is known here."""
        return self.output_len < self.sampling.min_tokens

    @property
    def has_rules(self) -> bool:
        return self.always_rules or self.waits

    def wanted(self, want: int) -> int:
        """The depth of its proposals in a step that proposes `want` deep."""
        return want if self.depth is None else min(want, self.depth)

    def refuse(self, error: Exception) -> None:
        self.error = f"the engine could not start this request: {type(error).__name__}"

    def advance_grammar(self) -> None:
        """Take its grammar to the end of the tokens that are known. Raises ValueError where it does not allow them."""
        if self.grammar is not None and self.grammar_tokens < self.output_len:
            self.grammar.commit(self.tokens[self.prompt_len + self.grammar_tokens :])
            self.grammar_tokens = self.output_len
