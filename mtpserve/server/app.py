"""The routes. `create_app` is handed an engine client, a fake one in tests, and a tokenizer; it starts and
stops nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import time
from typing import Any, get_args, get_type_hints

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from mtpserve import __version__
from mtpserve.config import EngineConfig, ServerConfig
from mtpserve.core.protocols.clients import EngineClient
from mtpserve.server import about, pauses
from mtpserve.server.anthropic.messages import CountedTokens, MessageObject, count_tokens, messages
from mtpserve.server.chat.formats import formats_of
from mtpserve.server.chat.service import Served, Service
from mtpserve.server.chat.tools import default_variables
from mtpserve.server.http.access import Count, Keys, RequestLog, RootPath, SocketOrigins
from mtpserve.server.http.errors import ANTHROPICS, AnthropicError, ErrorAnswer, add_error_handlers, no_socket
from mtpserve.server.http.limits import BodyLimit
from mtpserve.server.http.rendering import JSON, REFERENCE, described
from mtpserve.server.lora import (
    LoadedAdapters,
    load_lora,
    load_lora_adapter,
    unload_lora,
    unload_lora_adapter,
)
from mtpserve.server.observe.history import HistoryObject
from mtpserve.server.observe.metrics import Metrics
from mtpserve.server.observe.tracing import TraceContext, Tracing, tracing_of
from mtpserve.server.openai.chat import chat
from mtpserve.server.openai.completions import completions
from mtpserve.server.openai.objects import ChatObject, CompletionObject
from mtpserve.server.openai.others import invocations, no_vectors
from mtpserve.server.openai.responses import routes as responses
from mtpserve.server.openai.responses.response_objects import (
    CompactionObject,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
)
from mtpserve.server.openai.responses.socket import responses_socket
from mtpserve.server.openai.responses.store import ResponseStore
from mtpserve.server.openai.token_generation import TokenAnswer, generate_tokens
from mtpserve.server.openapi import Server
from mtpserve.server.page.page import LiveRequests, Stats, docs, page, requests, stats
from mtpserve.server.profile import ProfileStarted, ProfileStopped, start_profile, stop_profile
from mtpserve.server.sglang.control import Aborted, Flushed, abort_request, flush_cache, health_generate
from mtpserve.server.sglang.generate import Generated, generate
from mtpserve.server.sglang.loads import Loads, OneLoad, get_load, loads
from mtpserve.server.sglang.parsing import (
    ParsedCalls,
    SeparatedReasoning,
    parse_function_call,
    separate_reasoning,
)
from mtpserve.server.sglang.weights import (
    CallDone,
    Checked,
    NewVersion,
    Updated,
    destroy_weights_update_group,
    get_weights_by_name,
    init_weights_update_group,
    post_get_weights_by_name,
    update_weight_version,
    update_weights_from_disk,
    update_weights_from_distributed,
    update_weights_from_tensor,
    weights_checker,
)
from mtpserve.server.spec import SpecObject, set_spec, show_spec
from mtpserve.server.tokens import Detokenized, Tokenized, detokenize, tokenize, tokenizer_info
from mtpserve.text.chat_sampling import chat_sampling
from mtpserve.text.tokenizer import Tokenizer


async def metrics_text(service: Served) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


# What each answers: one of these, which is also what the OpenAPI document says; or a class of response where
# that is not JSON.
ROUTES: tuple[tuple[str, tuple[str, ...], Callable[..., Any], tuple[Any, ...] | type[Response]], ...] = (
    ("GET", ("/",), page, HTMLResponse),
    ("GET", ("/docs",), docs, HTMLResponse),
    ("GET", ("/stats",), stats, (Stats,)),
    ("GET", ("/stats/history",), about.history, (HistoryObject,)),
    ("GET", ("/stats/requests",), requests, (LiveRequests,)),
    ("GET", ("/health", "/ready", "/ping"), about.health, (about.Healthy, about.VerboseHealth)),
    ("GET", ("/health_generate",), health_generate, (about.Healthy,)),
    ("GET", ("/version",), about.version, (about.Version,)),
    ("GET", ("/metrics",), metrics_text, PlainTextResponse),
    ("GET", ("/v1/models",), about.models, (about.ModelList, about.AnthropicModels)),
    ("GET", ("/v1/models/{id:path}",), about.model, (about.ModelObject, about.AnthropicModel)),
    ("GET", ("/model_info", "/get_model_info"), about.model_info, (about.ModelInfo,)),
    ("GET", ("/server_info", "/get_server_info"), about.server_info, (about.ServerInfo,)),
    ("GET", ("/v1/loads", "/loads"), loads, (Loads,)),  # SGLang's, which routers poll; and its older one
    ("GET", ("/get_load",), get_load, (list[OneLoad],)),
    ("GET", ("/v1/spec",), show_spec, (SpecObject,)),
    ("POST", ("/v1/spec",), set_spec, (SpecObject,)),
    ("POST", ("/v1/completions",), completions, (CompletionObject,)),
    ("POST", ("/v1/chat/completions",), chat, (ChatObject,)),
    ("POST", ("/v1/responses",), responses.create, (ResponseObject,)),
    ("GET", ("/v1/responses/{id}",), responses.retrieve, (ResponseObject,)),
    ("DELETE", ("/v1/responses/{id}",), responses.delete, (DeletedResponse,)),
    ("GET", ("/v1/responses/{id}/input_items",), responses.input_items, (ItemList,)),
    ("POST", ("/v1/responses/input_tokens",), responses.count_input, (InputTokens,)),
    ("POST", ("/v1/responses/compact",), responses.compact, (CompactionObject,)),
    ("POST", ("/v1/responses/{id}/cancel",), responses.cancel, (ResponseObject,)),
    ("POST", ("/v1/messages",), messages, (MessageObject,)),
    ("POST", ("/v1/messages/count_tokens",), count_tokens, (CountedTokens,)),
    ("POST", ("/generate",), generate, (Generated, list[Generated])),
    ("POST", ("/inference/v1/generate",), generate_tokens, (TokenAnswer,)),
    ("POST", ("/tokenize", "/v1/tokenize"), tokenize, (Tokenized,)),
    ("POST", ("/detokenize", "/v1/detokenize"), detokenize, (Detokenized,)),
    ("POST", ("/parse_function_call",), parse_function_call, (ParsedCalls,)),
    ("POST", ("/separate_reasoning",), separate_reasoning, (SeparatedReasoning,)),
    ("GET", ("/flush_cache",), flush_cache, (Flushed,)),  # SGLang takes both
    ("POST", ("/flush_cache", "/reset_prefix_cache"), flush_cache, (Flushed,)),  # SGLang's name and vLLM's
    ("POST", ("/abort_request",), abort_request, (Aborted,)),
    ("POST", ("/update_weights_from_disk",), update_weights_from_disk, (Updated,)),
    ("POST", ("/update_weights_from_tensor",), update_weights_from_tensor, (Updated,)),
    ("POST", ("/update_weights_from_distributed",), update_weights_from_distributed, (Updated,)),
    ("POST", ("/init_weights_update_group",), init_weights_update_group, (CallDone,)),
    ("POST", ("/destroy_weights_update_group",), destroy_weights_update_group, (CallDone,)),
    ("GET", ("/get_weights_by_name",), get_weights_by_name, (list[float], list[list[float]])),
    ("POST", ("/get_weights_by_name",), post_get_weights_by_name, (list[float], list[list[float]])),
    ("POST", ("/weights_checker",), weights_checker, (Checked,)),
    ("POST", ("/update_weight_version",), update_weight_version, (NewVersion,)),
    ("POST", ("/v1/load_lora_adapter",), load_lora, PlainTextResponse),  # vLLM's
    ("POST", ("/v1/unload_lora_adapter",), unload_lora, PlainTextResponse),
    ("POST", ("/load_lora_adapter",), load_lora_adapter, (LoadedAdapters,)),  # SGLang's
    ("POST", ("/unload_lora_adapter",), unload_lora_adapter, (LoadedAdapters,)),
    ("POST", ("/pause_generation",), pauses.pause_generation, (pauses.Acknowledged,)),  # SGLang's
    ("POST", ("/continue_generation",), pauses.continue_generation, (pauses.Acknowledged,)),
    ("POST", ("/pause",), pauses.pause_vllm, (pauses.PauseState,)),  # vLLM's
    ("POST", ("/resume",), pauses.resume_vllm, (pauses.PauseState,)),
    ("POST", ("/sleep",), pauses.sleep, (pauses.Released,)),
    ("POST", ("/wake_up",), pauses.wake_up, (pauses.Resumed,)),
    ("GET", ("/is_sleeping",), pauses.is_sleeping, (pauses.IsSleeping,)),
    (
        "POST",
        ("/release_memory_occupation",),
        pauses.release_memory_occupation,
        (pauses.Released,),
    ),  # SGLang's
    ("POST", ("/resume_memory_occupation",), pauses.resume_memory_occupation, (pauses.Resumed,)),
    ("GET", ("/is_paused",), pauses.is_paused, (pauses.IsPaused,)),
    ("GET", ("/tokenizer_info",), tokenizer_info, (dict,)),  # vLLM's
    ("POST", ("/start_profile",), start_profile, (ProfileStarted,)),  # vLLM's and SGLang's
    ("POST", ("/stop_profile",), stop_profile, (ProfileStopped,)),
    ("GET", ("/load",), about.load, (about.ServerLoad,)),  # vLLM's
    ("POST", ("/invocations",), invocations, (CompletionObject, ChatObject)),
)
# of an answer's headers, those that a browser lets a page read
EXPOSED_HEADERS = ("request-id", "retry-after", "x-max-tokens-clamped", "x-request-id", "x-should-retry")
# Routes of models that give vectors; they are not described.
VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/rerank", "/score", "/classify", "/pooling")

TAKEN = [
    get_type_hints(endpoint)["body"] for _, _, endpoint, _ in ROUTES if "body" in endpoint.__annotations__
]
BODIES = [(get_args(body) or (body,))[0] for body in TAKEN]  # the class alone where the body may be left out
JSON_ANSWERS = [answer if isinstance(answer, tuple) else () for *_, answer in ROUTES]
(*SCHEMAS, ERROR, ANTHROPIC_ERROR), COMPONENTS = described([*JSON_ANSWERS, (ErrorAnswer,), (AnthropicError,)])
STREAMING = (
    completions, chat, generate, messages, responses.create, responses.retrieve, invocations,
)  # fmt: skip


# Whose form a route has, by the package of its function: the document's tags.
TAGS = {"openai": "OpenAI", "anthropic": "Anthropic", "sglang": "SGLang"}
OWN = "Server"


# What a body is that no class describes.
EITHER = {
    "anyOf": [
        {"$ref": REFERENCE.format(name="ChatRequest")},
        {
            "allOf": [
                {"$ref": REFERENCE.format(name="CompletionRequest")},
                {"not": {"required": ["messages"]}},
            ]
        },
    ]
}
EXTRA = {invocations: {"requestBody": {"content": {"application/json": {"schema": EITHER}}}}}


def responses_of(
    endpoint: Callable[..., Any], path: str, schema: dict[str, Any] | None
) -> dict[int | str, dict[str, Any]]:
    """A route's part of the document. Without the errors FastAPI would describe its own, which this server
    never sends."""
    error = {
        "content": {"application/json": {"schema": ANTHROPIC_ERROR if path.startswith(ANTHROPICS) else ERROR}}
    }
    content: dict[str, Any] = {} if schema is None else {"application/json": {"schema": schema}}
    if endpoint in STREAMING:
        content["text/event-stream"] = {}
    return {
        200: {"content": content},
        "4XX": {"description": "Refused"} | error,
        "5XX": {"description": "Failed"} | error,
    }


def summary_of(endpoint: Callable[..., Any]) -> str:
    """Returns the first sentence of the route's description, without its end."""
    return re.split(r"(?<=[.:;])\s", endpoint.__doc__ or "", maxsplit=1)[0].rstrip(".:;")


def add_middleware(app: FastAPI, config: ServerConfig, tracing: Tracing | None, count: Count) -> None:
    """`count`: told of every request's route, method and status."""
    # The last one is the outermost: even a refusal has an id, and a browser may read it.
    app.add_middleware(BodyLimit, limit=config.max_request_bytes)
    app.add_middleware(SocketOrigins, allowed=config.allowed_origins)
    app.add_middleware(Keys, keys=config.api_key, admin_keys=config.admin_api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # libraries send names of their own, and more of them with each version
            expose_headers=EXPOSED_HEADERS,
        )
    if tracing is not None:
        app.add_middleware(TraceContext, tracing=tracing)
    app.add_middleware(RequestLog, count=count)
    app.add_middleware(RootPath, root=config.root_path)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    engine_config: EngineConfig | None = None,
    server_config: ServerConfig | None = None,
) -> FastAPI:
    """`app.state.service.draining` may be set later: new requests and /health then get 503. Raises
    ConfigError for options that do not fit the tokenizer."""
    # FastAPI's own pages load scripts from elsewhere; the one at /docs does not.
    app = Server(title="mtpserve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.openapi_tags = [{"name": tag} for tag in (*TAGS.values(), OWN)]
    app.answers, app.bodies = COMPONENTS, BODIES
    config = server_config or ServerConfig()
    app.servers = [{"url": config.root_path}] if config.root_path else []
    metrics = Metrics(client, config.dialects)
    engine = engine_config or EngineConfig()
    sampling = chat_sampling(engine.model, tokenizer)
    formats = formats_of(config, client.card, tokenizer, sampling if tokenizer.has_chat_template else None)
    variables, tracing = default_variables(config, tokenizer), tracing_of(config, client.card.name)
    app.state.service = Service(
        client, tokenizer, metrics, int(time()), engine, config, variables, formats, sampling, tracing
    )
    app.state.responses = ResponseStore()
    add_middleware(app, config, tracing, metrics.http_request)
    add_error_handlers(app)
    app.add_api_websocket_route("/v1/responses", responses_socket)
    app.add_api_websocket_route("/{path:path}", no_socket)
    for path in VECTORS:
        app.add_api_route(path, no_vectors, methods=["POST"], include_in_schema=False)
    for (method, paths, endpoint, answer), schema in zip(ROUTES, SCHEMAS, strict=True):
        for path in paths:
            kind = JSON if isinstance(answer, tuple) else answer
            documented = responses_of(endpoint, path, schema if kind is JSON else None)
            tag = TAGS.get(endpoint.__module__.split(".")[2], OWN)
            more: dict[str, Any] = {
                "tags": [tag],
                "summary": summary_of(endpoint),
                "response_class": kind,
                "responses": documented,
                "openapi_extra": EXTRA.get(endpoint),
            }
            app.add_api_route(path, endpoint, methods=[method], response_model=None, **more)
            if method == "GET":
                app.add_api_route(
                    path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False
                )
    return app
