"""What the offline engine gives for a prompt: whole, or step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from mtpserve.core.request import Finish, Proposal, TokenEvent, TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.detokenizer import Detokenizer
from mtpserve.text.experts import TokenExperts
from mtpserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Completion:
    """`finish_reason` is stop, length or error; `text` and `tokens` are those generated until then."""

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int  # of these, found in the prefix cache
    drafted: int  # draft tokens verified for this prompt
    accepted: int  # how many of them were accepted
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None  # one for each of `tokens`, with SamplingParams.logprobs
    # of the prompt from its second token on, with SamplingParams.prompt_logprobs
    prompt_logprobs: list[TokenLogprob] | None = None
    # what each step proposed and accepted, with Speculation.trace
    trace: list[Proposal] = field(default_factory=list)
    # [tokens of prompt and output but the last, layers, experts], with SamplingParams.return_routed_experts
    routed_experts: NDArray[Any] | None = None

    @property
    def outputs(self) -> list[Self]:
        """The completion itself: programs for vLLM read `output.outputs[0].text`."""
        return [self]

    @property
    def token_ids(self) -> list[int]:
        """The same as `tokens`, under vLLM's name."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One step of one request. The pieces, joined, are its new text; text that may become a stop string is
    held back."""

    tokens: list[int]  # accepted drafts, then the trunk's own token; cut off after a stop
    proposal: Proposal  # the drafts that were verified
    accepted: int  # drafts among `tokens`
    accepted_pieces: list[str]
    own_piece: str
    # one per rejected draft; of a tree, only the likeliest branch after the accepted drafts
    rejected_pieces: list[str]
    finish: Finish | None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0  # with the first token: of the prompt, found in the prefix cache

    @property
    def text(self) -> str:
        return "".join(self.accepted_pieces) + self.own_piece


@dataclass(slots=True)
class OfflineRequest:
    """One request while it runs: turns its events into steps."""

    tokenizer: Tokenizer
    detokenizer: Detokenizer
    prompt_tokens: int
    params: SamplingParams
    steps: list[StreamStep] = field(default_factory=list)
    sizes: tuple[int, int, int] | None = None  # of the experts of a token, where the request wants them
    experts: TokenExperts = field(default_factory=TokenExperts)

    def take(self, event: TokenEvent) -> StreamStep:
        self.experts.add(event.routed_experts)
        pieces: list[str] = []
        stopped = False
        for token in event.tokens:
            delta = self.detokenizer.push([token])
            pieces.append(delta.text)
            if stopped := delta.stopped:
                break
        accepted = min(event.num_accepted_tokens, len(pieces))
        text = "".join(pieces[accepted:])
        if event.finish is not None and not stopped:
            text += self.detokenizer.finish()
        return StreamStep(
            tokens=event.tokens[: len(pieces)],
            proposal=event.proposal,
            accepted=accepted,
            accepted_pieces=pieces[:accepted],
            own_piece=text,
            rejected_pieces=[self.tokenizer.decode([token]) for token in refused(event)],
            finish=Finish.STOP if stopped else event.finish,
            error=event.error,
            logprobs=None if event.logprobs is None else event.logprobs[: len(pieces)],
            prompt_logprobs=event.prompt_logprobs,
            cached_tokens=event.num_cached_tokens,
        )

    def completion(self) -> Completion:
        last, tokens = self.steps[-1], [token for step in self.steps for token in step.tokens]
        return Completion(
            text="".join(step.text for step in self.steps),
            tokens=tokens,
            finish_reason=str(last.finish),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=sum(step.cached_tokens for step in self.steps),
            drafted=sum(len(step.proposal.tokens) for step in self.steps),
            accepted=sum(step.accepted for step in self.steps),
            error=last.error,
            logprobs=joined(step.logprobs for step in self.steps),
            prompt_logprobs=joined(step.prompt_logprobs for step in self.steps),
            trace=[step.proposal for step in self.steps if step.tokens and self.params.speculation.trace],
            routed_experts=None if self.sizes is None else self.routed_experts(self.sizes, len(tokens)),
        )

    def routed_experts(self, sizes: tuple[int, int, int], num_output_tokens: int) -> NDArray[Any]:
        numbers = self.experts.numbers(self.prompt_tokens + num_output_tokens)
        np = import_module("numpy")  # not at the top: the engine has imported it, and other users have not
        array: NDArray[Any] = np.frombuffer(numbers, np.uint8 if sizes[2] == 1 else np.uint16)
        return array.reshape(-1, *sizes[:2])


def joined(parts: Iterable[list[TokenLogprob] | None]) -> list[TokenLogprob] | None:
    logprobs = [scores for scores in parts if scores is not None]
    return [score for scores in logprobs for score in scores] if logprobs else None


def refused(event: TokenEvent) -> list[int]:
    """The rejected drafts that continue the accepted ones: the likeliest branch below the last accepted
    node."""
    proposal, node = event.proposal, ([0, *event.proposal.path])[-1]
    tokens = []
    for draft, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True), 1):
        if parent == node and draft not in proposal.path:
            tokens.append(token)
            node = draft
    return tokens
