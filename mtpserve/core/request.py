"""What travels between the front end and the engine: requests down, events and statistics up. Plain data, sent as msgpack."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpserve.core.sampling import SamplingParams
from mtpserve.core.sequence import Finish


@dataclass(frozen=True, slots=True)
class Request:
    """`id` is made by the front end and unique while the request lives."""

    id: str
    prompt: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step's yield for one request: 0 … K+1 tokens, of which the first `accepted` were drafts. The last event has `finish`.

    `proposed` are the drafts that the step verified, accepted or not; `error` is set when finish is ERROR.
    """

    id: str
    tokens: list[int]
    accepted: int = 0
    proposed: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the front end must know of the model that the engine has loaded."""

    name: str
    vocab: int
    context_length: int
    eos_ids: tuple[int, ...]
    speculative_steps: int  # 0: plain decoding


@dataclass(slots=True)
class EngineStats:
    """Counters since start (…_total and lists) and gauges of now. Position i of the lists is draft i+1."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    failed_requests_total: int = 0
    drafts_total: int = 0  # verifications that had at least one draft
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    draft_tokens_per_position: list[int] = field(default_factory=list)
    accepted_tokens_per_position: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)  # [n]: verifications that committed n+1 tokens
