"""One request's events from the engine, as steps of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import structs

from mtpserve.core.kv_transfer import PageOffer
from mtpserve.core.request import Finish, Proposal, TokenEvent, TokenLogprob
from mtpserve.server.observe.observed import RequestClock
from mtpserve.text.detokenizer import Detokenizer


class StepOutput(msgspec.Struct, frozen=True):
    """What one step added to one choice's text. The last one has `finish`."""

    text: str
    tokens: list[int]  # those that count: up to the one that completed a stop string
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None  # one for each of `tokens`
    prompt_logprobs: list[TokenLogprob] | None = None  # for the next prompt tokens
    proposal: Proposal = Proposal()
    num_accepted_tokens: int = 0  # proposed tokens that the step accepted, before any stop string
    num_cached_tokens: int = 0  # with the first token: of the prompt, found in the prefix cache
    offer: PageOffer | None = None  # with `finish`
    index: int = 0  # the choice's number in its answer
    # with `finish`: the token or the stop string that ended the text, if one did
    matched_stop: int | str | None = None
    routed_experts: tuple[int, list[bytes]] | None = None  # see core.request.TokenEvent
    weight_version: str = ""  # as in TokenEvent

    @property
    def accepted_nodes(self) -> list[int]:
        """Accepted tokens that are in the text, as nodes of the proposal."""
        return self.proposal.path[: min(self.num_accepted_tokens, len(self.tokens))]

    def without_output(self) -> StepOutput:
        """The step where the client wants the prompt's scores alone: no text and no tokens."""
        return structs.replace(
            self,
            text="",
            tokens=[],
            finish=self.finish and Finish.LENGTH,
            logprobs=None,
            proposal=Proposal(),
            num_accepted_tokens=0,
            matched_stop=None,
        )


@dataclass(slots=True)
class StepReader:
    """One request's events as StepOutputs."""

    detokenizer: Detokenizer
    clock: RequestClock
    index: int = 0  # the choice's number in its answer
    started: bool = False  # a token has come
    finish: Finish | None = None
    error: str | None = None  # the request has failed, after what was read

    def read(self, events: Sequence[TokenEvent]) -> list[StepOutput]:
        """One for each event, up to the one that ends the request."""
        steps: list[StepOutput] = []
        for event in events:
            if event.finish in (Finish.ERROR, Finish.ABORT):
                self.error = event.error or "the request was aborted"
                break
            step = self._step(event)
            self.clock.tokens(len(step.tokens), event.times, event.num_cached_tokens)
            self.started = self.started or bool(event.tokens)
            steps.append(step)
            if step.finish is not None:
                self.finish = step.finish
                break
        return steps

    def _step(self, event: TokenEvent) -> StepOutput:
        """The event's tokens as text: up to a stop string, or with what was held back where the engine has
        ended the request."""
        text, used, stopped = self.detokenizer.push(event.tokens)
        if event.finish is not None and not stopped:
            text += self.detokenizer.finish()
            stopped = self.detokenizer.matched is not None
        finish = Finish.STOP if stopped else event.finish
        tokens, logprobs = event.tokens, event.logprobs
        if used < len(tokens):
            tokens, logprobs = tokens[:used], None if logprobs is None else logprobs[:used]
        step = StepOutput(
            text, tokens, finish, logprobs, event.prompt_logprobs, event.proposal, event.num_accepted_tokens,
            event.num_cached_tokens,
            event.offer,
            self.index,
            self.detokenizer.matched, event.routed_experts, event.weight_version,
        )  # fmt: skip
        if step.proposal.tokens:
            self.clock.verified(len(step.proposal.tokens), len(step.accepted_nodes))
        return step

    def aborted(self) -> StepOutput:
        """The client has ended the request by its id."""
        self.finish = Finish.ABORT
        return StepOutput(self.detokenizer.finish(), [], self.finish, index=self.index)
