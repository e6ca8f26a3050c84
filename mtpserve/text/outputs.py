"""What the offline engine gives for a prompt: whole, or step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from mtpserve.core.request import Finish, ModelCard, Proposal, Request, TokenEvent, TokenLogprob
from mtpserve.core.state.weight_versions import VersionSpan, WeightVersions
from mtpserve.text.detokenizer import Detokenizer
from mtpserve.text.experts import TokenExperts
from mtpserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Completion:
    """`finish_reason` is stop, length, abort or error, and None while an AsyncLLM's request runs; `text` and
    `tokens` are those generated until then."""

    text: str
    tokens: list[int]
    finish_reason: str | None
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
    # of the weights that chose the tokens
    weight_versions: list[VersionSpan] = field(default_factory=list)

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
    traced: bool = False
    steps: list[StreamStep] = field(default_factory=list)
    sizes: tuple[int, int, int] | None = None  # of the experts of a token, where the request wants them
    experts: TokenExperts = field(default_factory=TokenExperts)
    num_output_tokens: int = 0
    weight_versions: WeightVersions = field(default_factory=WeightVersions)

    @staticmethod
    def of(tokenizer: Tokenizer, request: Request, card: ModelCard) -> OfflineRequest:
        sampling = request.sampling
        return OfflineRequest(
            tokenizer,
            Detokenizer(tokenizer.fast, sampling, card.eos_ids, request.prompt),
            len(request.prompt),
            sampling.speculation.trace,
            sizes=card.experts if sampling.return_routed_experts else None,
        )

    def take(self, event: TokenEvent, weight_version: str = "") -> StreamStep:
        """`weight_version`: of the event's tokens, where the event does not say it."""
        self.experts.add(event.routed_experts)
        pieces: list[str] = []
        stopped = False
        for token in event.tokens:
            delta = self.detokenizer.push([token])
            pieces.append(delta.text)
            if stopped := delta.stopped:
                break
        self.weight_versions.add(event.weight_version or weight_version, self.num_output_tokens)
        self.num_output_tokens += len(pieces)
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

    def read(self, events: Sequence[TokenEvent]) -> StreamStep:
        """Keeps the steps of events, up to the one that ends the text. Returns the last step."""
        for event in events:
            self.steps.append(self.take(event))
            if self.steps[-1].finish is not None:
                break
        return self.steps[-1]

    def abort(self) -> None:
        """Ends the text with what it has."""
        text = self.detokenizer.finish()
        self.steps.append(StreamStep([], Proposal(), 0, [], text, [], Finish.ABORT))

    def completion(self) -> Completion:
        last, tokens = self.steps[-1], [token for step in self.steps for token in step.tokens]
        return Completion(
            text="".join(step.text for step in self.steps),
            tokens=tokens,
            finish_reason=None if last.finish is None else str(last.finish),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=sum(step.cached_tokens for step in self.steps),
            drafted=sum(len(step.proposal.tokens) for step in self.steps),
            accepted=sum(step.accepted for step in self.steps),
            error=last.error,
            logprobs=joined(step.logprobs for step in self.steps),
            prompt_logprobs=joined(step.prompt_logprobs for step in self.steps),
            trace=[step.proposal for step in self.steps if step.tokens] if self.traced else [],
            routed_experts=None if self.sizes is None else self.routed_experts(self.sizes, len(tokens)),
            weight_versions=self.weight_versions.spans(self.num_output_tokens),
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
