"""What travels between the front end and the engine: requests down, events and reports up. Plain data, sent
as msgpack. Statistics are in core/stats."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from mtpserve.core.kv_transfer import PageOffer, PageSource
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.sampling import SamplingParams


class Finish(StrEnum):
    """Why a request ended; the first two are OpenAI's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """`id` is made by the front end and unique while the request lives.

    What `sampling` says in text is here in tokens: the front end has the tokenizer, the engine none.

    A request whose engine was lost goes on in another one, as after a preemption: `prior_output_ids` is what
    it had said by then, `num_scored_prompt_tokens` how many prompt tokens, from the second on, had their
    log-probabilities reported. Noise depends on the seed and the index of a token alone.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)  # every spelling of sampling.bad_words
    prediction: list[int] = field(default_factory=list)  # sampling.speculation.prediction
    salt: str = ""  # requests with different ones share no pages
    # drawn for it where sampling has none, so that another engine has the same; None: the engine draws one
    seed: int | None = None
    prior_output_ids: list[int] = field(default_factory=list)
    num_scored_prompt_tokens: int = 0
    is_migrated: bool = False  # from an engine that was lost: no queue is too long for it
    source: PageSource | None = None  # who has the pages of its prompt
    kv_offer_id: str | None = None  # the name under which its prompt's pages are kept for another node
    lora: LoRARequest | None = None  # the adapter that it is computed with
    choices: int = 1  # texts that are made of its prompt; 0 for all of them but the first

    @property
    def max_depth(self) -> int | None:
        """How deep it lets the engine draft; None: as deep as the engine does."""
        return self.sampling.speculation.depth

    @property
    def plain(self) -> bool:
        """Drafts come from the algorithm alone: neither a grammar nor a prediction proposes any."""
        return self.sampling.grammar is None and not self.prediction


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability and its rank (1 is the likeliest), with those of the likeliest tokens, the
    likeliest first."""

    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


class Proposal(msgspec.Struct, frozen=True, gc=False):
    """The drafts that one step verified for one request. Node 0 is the token before them, draft i is node i +
    1."""

    tokens: list[int] = []
    parents: list[int] = []  # the node that each continues
    sources: list[str] = []  # the source of each: see core.batch.Source.names
    path: list[int] = []  # the nodes that were accepted, in order


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """What a request waited for before its first token, in seconds of the engine's clock."""

    queued: float  # until it got a seat
    # from there to the token: its prompt's computation, preemption in the middle of it included
    prompt: float


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One step's yield for one request: 0 … K+1 tokens, of which the first `num_accepted_tokens` were drafts.
    The last event has `finish`.

    `error` is set when finish is ERROR.
    """

    id: str
    tokens: list[int]
    num_accepted_tokens: int = 0
    proposal: Proposal = Proposal()
    finish: Finish | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None  # one for each of `tokens`, where the request wants them
    prompt_logprobs: list[TokenLogprob] | None = None  # for the next prompt tokens, from the second on
    times: FirstTokenTimes | None = None  # with the first token
    # with the first token: prompt tokens from the prefix cache, not computed for this request
    num_cached_tokens: int = 0
    # with `finish`: its prompt's pages, where the request wants them kept for another node
    offer: PageOffer | None = None
    routed_experts: tuple[int, list[bytes]] | None = None  # of a token and the next ones: see SpanResult
    weight_version: str = ""  # with the first tokens, and with those after it has changed


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the front end must know of the model that the engine has loaded."""

    name: str
    vocab: int
    context_length: int  # that a request may have
    eos_ids: tuple[int, ...]
    speculative_steps: int  # 0: plain decoding
    lossy: bool = False  # acceptance thresholds below 1: the output's distribution is not the model's
    synthetic_acceptance: str | None = None  # the curve by which drafts are accepted: texts mean nothing
    page_size: int = 1  # tokens in one page of the KV pool
    capacity: int | None = None  # requests that may run and wait at once; None: any number
    kernels: str = ""  # what computes, and on which instruction set: identical output is promised on one
    # the formats that models of its family write, by the names of text/parsers/registry
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    algorithm: str | None = None  # as --speculative-algorithm names it; None: plain decoding
    drafting: str = ""  # what drafts, and why, for people
    checkpoint: str = ""  # as --model names it
    device: str = ""  # cpu or cuda
    weight_format: str = ""  # how the weights are stored here: a dtype, fp8, int4 or int8
    experts: tuple[int, int, int] | None = None  # kept of each token: layers, experts, bytes of a number
    wanted_context: int = 0  # more than `context_length` where the KV pool does not hold that much
