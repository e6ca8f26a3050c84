"""What a request used: OpenAI's counts, and what speculation did for it."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from mtpserve.core.request import Proposal
from mtpserve.server.openai.objects import Proposed, SpeculativeUsage, TokenDetails, TraceStep, UsageObject
from mtpserve.server.service import Piece
from mtpserve.text.tokenizer import Tokenizer

PREDICTION = "prediction"  # the source of drafts that came from the client's predicted output


@dataclass(slots=True)
class Usage:
    """Of all choices together; a prompt counts once, however many continue it."""

    prompt_tokens: int
    completion_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    reasoning_tokens: int = 0

    def add(self, piece: Piece, reasoning_tokens: int = 0) -> None:
        self.completion_tokens += len(piece.tokens)
        self.reasoning_tokens += reasoning_tokens
        if not piece.tokens:
            return
        self.steps += 1
        proposal, kept = piece.proposal, kept_nodes(piece)
        self.draft_tokens += len(proposal.tokens)
        self.accepted_tokens += len(kept)
        self.predicted += proposal.sources.count(PREDICTION)
        self.predicted_accepted += sum(proposal.sources[node - 1] == PREDICTION for node in kept)

    def object(self) -> UsageObject:
        return UsageObject(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            TokenDetails(self.predicted_accepted, self.predicted - self.predicted_accepted, self.reasoning_tokens),
            SpeculativeUsage(self.steps, self.draft_tokens, self.accepted_tokens),
        )


def kept_nodes(piece: Piece) -> list[int]:
    """Drafts that stand in the text; a stop string may have cut some that were accepted."""
    return piece.proposal.path[: min(piece.accepted, len(piece.tokens))]


class Trace:
    """One choice's steps.

    Where a character is made of several tokens, the one that completes it has it in `texts`. Special tokens are spelled out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, piece: Piece) -> TraceStep:
        proposal: Proposal = piece.proposal
        kept, tokenizer = set(kept_nodes(piece)), self._tokenizer
        nodes = enumerate(zip(proposal.tokens, proposal.parents, proposal.sources, strict=True), 1)
        return TraceStep(
            piece.tokens,
            [self._decoder.decode(tokenizer.token_bytes(token)) for token in piece.tokens],
            [Proposed(token, tokenizer.token_text(token), parent, source, node in kept) for node, (token, parent, source) in nodes],
        )
