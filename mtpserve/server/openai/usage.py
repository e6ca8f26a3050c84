"""What a request used: OpenAI's counts, and what speculation did for it."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

from mtpserve.core.request import Proposal
from mtpserve.server.chat.generation import Choice
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.http.rendering import Rendered
from mtpserve.text.tokenizer import Tokenizer

PREDICTION = "prediction"  # the source of drafts from the client's predicted output


class PromptDetails(Rendered):
    cached_tokens: int


class TokenDetails(Rendered):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class SpeculativeUsage(Rendered):
    """Ours."""

    steps: int
    draft_tokens: int
    accepted_tokens: int


class UsageObject(Rendered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: TokenDetails
    speculative: SpeculativeUsage


class Proposed(Rendered):
    token: int
    text: str
    parent: int
    source: str
    accepted: bool


class TraceStep(Rendered):
    """What a step committed, what had been proposed, by whom, and what of that was accepted."""

    tokens: list[int]
    texts: list[str]
    proposed: list[Proposed]


@dataclass(slots=True)
class Usage:
    """The token counts of all choices together. A prompt counts once, however many choices continue it, with
    the cached tokens of its first choice."""

    choices: list[Choice]  # each prompt's, one after the other
    per_prompt: int
    prompt_tokens: int = field(init=False)
    completion_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    predicted: int = 0
    predicted_accepted: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = sum(len(choice.request.prompt) for choice in self.firsts)

    @property
    def firsts(self) -> list[Choice]:
        return self.choices[:: self.per_prompt]

    def add(self, step: StepOutput) -> None:
        self.completion_tokens += len(step.tokens)
        if not step.tokens:
            return
        self.steps += 1
        proposal = step.proposal
        if not proposal.tokens:
            return
        self.draft_tokens += len(proposal.tokens)
        accepted_nodes = step.accepted_nodes
        self.accepted_tokens += len(accepted_nodes)
        self.predicted += proposal.sources.count(PREDICTION)
        self.predicted_accepted += sum(proposal.sources[node - 1] == PREDICTION for node in accepted_nodes)

    def object(self) -> UsageObject:
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self.choices)
        return UsageObject(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            PromptDetails(sum(choice.cached_tokens for choice in self.firsts)),
            TokenDetails(self.predicted_accepted, self.predicted - self.predicted_accepted, reasoning_tokens),
            SpeculativeUsage(self.steps, self.draft_tokens, self.accepted_tokens),
        )


class Trace:
    """One choice's steps.

    Where a character is made of several tokens, the one that completes it has it in `texts`. Special tokens
    are spelled out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, step: StepOutput) -> TraceStep:
        proposal: Proposal = step.proposal
        accepted_nodes, tokenizer = set(step.accepted_nodes), self._tokenizer
        nodes = enumerate(zip(proposal.tokens, proposal.parents, proposal.sources, strict=True), 1)
        return TraceStep(
            step.tokens,
            [self._decoder.decode(tokenizer.token_bytes(token)) for token in step.tokens],
            [
                Proposed(token, tokenizer.token_text(token), parent, source, node in accepted_nodes)
                for node, (token, parent, source) in nodes
            ],
        )
