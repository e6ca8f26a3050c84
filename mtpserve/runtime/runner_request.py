"""What the host's side of a runner knows of the request in each seat: what its admission says, and what its
results said since.

A step keeps the records of its spans until it is read, not their seats: by then a seat may be another
request's.
"""

from __future__ import annotations

from mtpserve.core.plan import NewRequest
from mtpserve.core.protocols.grammars import Grammar
from mtpserve.runtime.sampling.proposals import Proposals

# A captured step proposes without a grammar's mask. Where the grammar then takes a third of the first
# proposals, a step has 2.7 tokens instead of 3.7 (demo model, JSON schemas).
MIN_FIRST_PROPOSALS, MAX_LOST_SHARE = 16, 1 / 3


class RunnerRequest:
    """One request, from its admission on."""

    def __init__(self, new_request: NewRequest) -> None:
        request, params = new_request.request, new_request.request.sampling
        self.new_request, self.request, self.req_idx = new_request, request, new_request.req_idx
        self.id, self.sampling = request.id, params
        self.num_prompt_tokens = len(request.prompt)
        self.max_depth = request.max_depth
        self.has_prediction = bool(request.prediction)
        self.tokens = request.prompt + new_request.output_ids  # as far as results were read
        self.grammar: Grammar | None = None  # knows the first `grammar_tokens` of the output
        self.grammar_tokens = 0
        # With a grammar: what its next step verifies, where the host knows that; None: it does not.
        self.proposals: Proposals | None = None
        self.num_waiting = 0  # their number, or a bound
        self.num_first_proposals = self.num_lost_proposals = 0  # first ones, and those that did not stay
        self.error: str | None = None  # why it cannot be computed
        self.bad_words = tuple(tuple(word) for word in request.bad_words if len(word) > 1)
        self.has_bias = bool(
            params.logit_bias or params.allowed_token_ids or len(self.bad_words) < len(request.bad_words)
        )
        self.has_penalty = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        self.host_rules = bool(self.bad_words)  # they are not in tables of the device
        self.always_rules = bool(self.has_bias or self.has_penalty or self.host_rules)
        # Its steps have no rule but those that are always in tables of the device.
        self.is_simple = not (
            self.host_rules or self.has_prediction or params.min_tokens > 0 or params.grammar is not None
        )
        self.first_constrained_token, self.min_tokens = params.first_constrained_token, params.min_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_below_min_tokens(self) -> bool:
        """It may not end yet, as far as is known here."""
        return self.min_tokens > 0 and self.num_output_tokens < self.min_tokens

    @property
    def is_constrained(self) -> bool:
        """Its grammar may bear on this step."""
        first = self.first_constrained_token
        return first is not None and self.num_output_tokens >= first

    @property
    def has_free_proposals(self) -> bool:
        """Some of its proposals cost no pass of a model: those of a grammar, or of a prediction."""
        return self.has_prediction or self.is_constrained

    @property
    def has_table_rules(self) -> bool:
        """It has a rule that the device reads from tables, or words of several tokens."""
        return self.always_rules or self.is_below_min_tokens

    @property
    def has_rules(self) -> bool:
        return self.has_table_rules or self.is_constrained

    @property
    def needs_masked_proposals(self) -> bool:
        """Its grammar leaves little of what is proposed without a mask."""
        enough = self.num_first_proposals >= MIN_FIRST_PROPOSALS
        return enough and self.num_lost_proposals > MAX_LOST_SHARE * self.num_first_proposals

    def depth(self, limit: int) -> int:
        """The depth of its proposals in a step that proposes `limit` deep."""
        return limit if self.max_depth is None else min(limit, self.max_depth)

    def refuse(self, error: Exception) -> None:
        self.error = f"the engine could not start this request: {type(error).__name__}"

    def advance_grammar(self) -> None:
        """Take its grammar to the end of the tokens that are known. Raises ValueError where it does not allow
        them."""
        if self.grammar is not None and self.grammar_tokens < self.num_output_tokens:
            self.grammar.commit(self.tokens[self.num_prompt_tokens + self.grammar_tokens :])
            self.grammar_tokens = self.num_output_tokens
