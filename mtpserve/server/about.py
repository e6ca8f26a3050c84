"""Health, version, models and launch options: read-only."""

from __future__ import annotations

from dataclasses import asdict
from time import gmtime, strftime
from typing import Any, Literal

from msgspec import defstruct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mtpserve import __version__
from mtpserve.config import EngineConfig, ServerConfig
from mtpserve.config.server import NONE
from mtpserve.core.errors import EngineBusy, InvalidRequest
from mtpserve.core.stats.engine_stats import DraftState
from mtpserve.server.chat.service import Served, Service
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.text.chat_sampling import Source


class Healthy(Rendered):
    """degraded: some engine of several is gone, or is just being started again."""

    status: Literal["ok", "degraded"]


class Drafting(Rendered):
    """What the engine knows of its draft model."""

    state: DraftState
    start_acceptance: float | None
    floor: float
    faults: int
    reason: str | None


class EngineHealth(Rendered):
    engine: int
    state: Literal["starting", "up", "dead"]
    restarts: int
    reason: str | None  # why its last process died
    ranks: int  # processes that compute its model together


class VerboseHealth(Healthy):
    drafting: Drafting
    engines: list[EngineHealth]


class ServerLoad(Rendered):
    server_load: int  # requests that run or wait


class Version(Rendered):
    version: str


class DefaultSampling(Rendered):
    """How a chat is sampled that names none of these fields, and who says so. `raw`: nobody."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    source: Source


class ModelObject(Rendered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # where vLLM's clients look for the tokenizer
    parent: str | None  # of an adapter: the model
    max_model_len: int
    speculative_steps: int
    synthetic_acceptance: str | None
    default_sampling: DefaultSampling


class ModelList(Rendered):
    object: Literal["list"]
    data: list[ModelObject]


class AnthropicModel(Rendered):
    """A model as Anthropic's API lists it, for requests with the header anthropic-version."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(Rendered):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


class ModelInfo(Rendered):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    weight_version: str
    is_generation: bool
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    speculative_steps: int
    lossy: bool
    synthetic_acceptance: str | None
    sampling_defaults: dict[str, float]


class InternalState(Rendered):
    # SGLang's names: tokens per verification, null before the first one; tokens in the KV pool
    avg_spec_accept_length: float | None
    max_total_num_tokens: int
    running: int
    waiting: int
    paused: int  # engines that compute nothing until /continue_generation
    sleeping: int  # engines that have given memory back
    pages_used: int
    pages_cached: int
    pages_total: int
    tier_pages: dict[str, int]
    tier_pages_total: dict[str, int]
    loaded_pages: dict[str, int]
    steps_total: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generation_tokens_total: int


def options(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """Every launch option that is not secret, under its own name."""
    sections = (section for section in asdict(engine).values() if isinstance(section, dict))
    return {name: value for section in sections for name, value in section.items()} | server.public()


OPTIONS = [(name, Any) for name in options(EngineConfig(), ServerConfig())]
STATE = [
    ("version", str),
    ("model_path", str),  # SGLang's name: routers tell by these which model a server has
    ("tokenizer_path", str),
    ("weight_version", str),  # the operator's name, which an update may change
    ("dp_size", int),
    ("tp_size", int),
    ("lossy", bool),
    ("synthetic_acceptance", str | None),
    ("kernels", str),
    ("drafter", str),
    ("max_total_num_tokens", int),  # that the KV pools hold; as SGLang has it, here and below
    ("internal_states", list[InternalState]),
]
ServerInfo = defstruct("ServerInfo", [*OPTIONS, *STATE], bases=(Rendered,))


async def health(service: Served, verbose: bool = False) -> Response:
    """Say whether the server takes requests. 200: it does; 503 while the model loads, from SIGTERM on, and
    while no engine is up. `verbose` adds the state of the engines and of the draft model, which changes
    no status."""
    service.check_ready()
    engines = service.client.engines
    up = sum(engine.state == "up" for engine in engines)
    if up == 0:
        raise EngineBusy(f"no engine is up: {engines[0].reason}; it is being started again")
    status: Literal["ok", "degraded"] = "ok" if up == len(engines) else "degraded"
    if not verbose:
        return JSON(Healthy(status))
    draft_health = service.client.stats().draft_health
    drafting = Drafting(
        draft_health.state,
        draft_health.start,
        draft_health.floor,
        draft_health.faults_total,
        draft_health.reason or None,
    )
    ranks = service.engine_config.parallel.ranks
    states = [
        EngineHealth(engine.number, engine.state, engine.restarts_total, engine.reason or None, ranks)
        for engine in engines
    ]
    return JSON(VerboseHealth(status, drafting, states))


async def load(service: Served) -> Response:
    """The number of requests that run or wait, in vLLM's form."""
    stats = service.client.stats()
    return JSON(ServerLoad(stats.running + stats.waiting))


async def version() -> Response:
    """The version of mtpserve."""
    return JSON(Version(__version__))


def default_sampling(service: Service) -> DefaultSampling:
    values: dict[str, Any] = service.chat_sampling.effective_values
    return DefaultSampling(**values, source=service.chat_sampling.source)


def model_object(service: Service, name: str) -> ModelObject:
    card, lora = service.client.card, service.lora_of(name)
    root = str(service.engine_config.model.directory.absolute()) if lora is None else lora.lora_path
    parent = None if lora is None else service.model
    steps, curve = card.speculative_steps, card.synthetic_acceptance
    sampling = default_sampling(service)
    return ModelObject(
        name, "model", service.created, "mtpserve", root, parent, card.context_length, steps, curve, sampling
    )


def model_for_anthropic(service: Service, name: str) -> AnthropicModel:
    date, context = (
        strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(service.created)),
        service.client.card.context_length,
    )
    return AnthropicModel("model", name, name, date, context, context)


def from_anthropic(request: Request) -> bool:
    """True if the request is from Anthropic's clients. They ask for models under OpenAI's paths, and all send
    one header."""
    return "anthropic-version" in request.headers


async def history(service: Served, since: float = 0) -> Response:
    """Time series of the last ten minutes, for charts. `since` leaves out what is older: seconds since
    the server began."""
    if not abs(since) < float("inf"):
        raise InvalidRequest(f"since must be a finite number of seconds, got {since}", "since")
    service.history.sample()
    return JSON(service.history.since(since), headers={"Cache-Control": "no-store"})


async def models(request: Request, service: Served) -> Response:
    """List the model that is served, once under each of its names, and its adapters. Clients of Anthropic
    get Anthropic's form."""
    names = [*service.names, *service.loras]
    if from_anthropic(request):
        listed = [model_for_anthropic(service, name) for name in names]
        return JSON(AnthropicModels(listed, False, names[0], names[-1]))
    return JSON(ModelList("list", [model_object(service, name) for name in names]))


async def model(request: Request, service: Served, id: str) -> Response:
    """Look up a model by its name. 404 for a name that is not served."""
    if not id:  # /v1/models/
        raise HTTPException(404)
    service.check_model(id)
    id = id if id in service.names or id in service.loras else service.model
    return JSON(model_for_anthropic(service, id) if from_anthropic(request) else model_object(service, id))


async def model_info(service: Served) -> Response:
    """Facts about the model, in SGLang's form. SGLang's clients load the tokenizer from the path, so the
    paths are whole."""
    card, model = service.client.card, service.engine_config.model
    return JSON(
        ModelInfo(
            model_path=str(model.directory.absolute()),
            tokenizer_path=str(model.tokenizer_directory.absolute()),
            served_model_name=card.name,
            weight_version=service.weight_version,
            is_generation=True,
            max_model_len=card.context_length,
            vocab_size=card.vocab,
            eos_token_ids=card.eos_ids,
            speculative_steps=card.speculative_steps,
            lossy=card.lossy,
            synthetic_acceptance=card.synthetic_acceptance,
            sampling_defaults=service.tokenizer.defaults,
        )
    )


async def server_info(service: Served) -> Response:
    """Launch options and state of the engine, in SGLang's form. Secret options are left out; the parsers
    and the drafter that `auto` has chosen are named."""
    card, stats = service.client.card, service.client.stats()
    launched, curve = options(service.engine_config, service.server_config), card.synthetic_acceptance
    launched |= {
        "tool_call_parser": service.formats.tool_calls or NONE,
        "reasoning_parser": service.formats.reasoning or NONE,
    }
    launched["speculative_algorithm"] = card.algorithm  # as in SGLang: null for plain decoding
    launched["served_model_name"] = card.name  # as SGLang has it: the first one
    counted = {name: getattr(stats, name) for name in InternalState.__struct_fields__[2:]}
    pool = stats.pages_total * card.page_size
    model = service.engine_config.model
    state: dict[str, Any] = {
        "model_path": str(model.directory.absolute()),
        "tokenizer_path": str(model.tokenizer_directory.absolute()),
        "weight_version": service.weight_version,
    }
    parallel = service.engine_config.parallel
    state |= {"dp_size": parallel.data_parallel_size, "tp_size": parallel.ranks}
    state |= {
        "version": __version__,
        "lossy": card.lossy,
        "synthetic_acceptance": curve,
        "kernels": card.kernels,
        "drafter": card.drafting,
    }
    internal = InternalState(stats.accept_length(), pool, **counted)
    return JSON(ServerInfo(**launched, **state, max_total_num_tokens=pool, internal_states=[internal]))
