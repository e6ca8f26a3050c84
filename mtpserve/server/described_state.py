"""What the routes say of the server, its models and its state: see described.py."""

from __future__ import annotations

from typing import Literal

from mtpserve.core.request import EngineStats
from mtpserve.server.described import Described


class Healthy(Described):
    status: Literal["ok"]


class Version(Described):
    version: str


class ModelObject(Described):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    speculative_steps: int
    synthetic_acceptance: str | None


class ModelList(Described):
    object: Literal["list"]
    data: list[ModelObject]


class AnthropicModel(Described):
    """For requests with the header anthropic-version."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(Described):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class ModelInfo(Described):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    speculative_steps: int
    lossy: bool
    synthetic_acceptance: str | None
    sampling_defaults: dict[str, float]


class InternalState(Described):
    avg_spec_accept_length: float | None
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    steps_total: int
    prompt_tokens_total: int
    generation_tokens_total: int


class ServerInfo(Described):
    """And every launch option under its own name."""

    version: str
    lossy: bool
    synthetic_acceptance: str | None
    internal_states: list[InternalState]


class Stats(Described):
    model: str
    version: str
    dead: str | None
    draining: bool
    warnings: list[str]
    speculative_steps: int
    context_length: int
    page_size: int
    stats: EngineStats
