"""The routes. `create_app` is handed an engine client, a fake one in tests, and a tokenizer; it starts and stops nothing."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from mtpserve import __version__
from mtpserve.config import EngineConfig, ServerConfig
from mtpserve.core.protocols import EngineClient
from mtpserve.server import described, described_state
from mtpserve.server.about import health, model, model_info, models, server_info, version
from mtpserve.server.anthropic.messages import count_tokens, messages
from mtpserve.server.http.access import Keys, RequestLog
from mtpserve.server.http.errors import JSON, ErrorAnswer, add_error_handlers
from mtpserve.server.http.limits import BodyLimit
from mtpserve.server.observe.metrics import Metrics
from mtpserve.server.observe.page import page, stats
from mtpserve.server.openai.chat import chat
from mtpserve.server.openai.completions import completions
from mtpserve.server.openai.responses import routes as responses
from mtpserve.server.openai.responses.store import ResponseStore
from mtpserve.server.service import Service
from mtpserve.server.sglang.control import abort_request, flush_cache, health_generate
from mtpserve.server.sglang.generate import generate
from mtpserve.server.sglang.parsing import parse_function_call, separate_reasoning
from mtpserve.server.tokens import detokenize, tokenize
from mtpserve.server.tools import default_variables
from mtpserve.text.tokenizer import Tokenizer

# FastAPI would describe its own error bodies, which this server never sends.
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
STREAMS: dict[str, Any] = {"content": {"text/event-stream": {}}}  # besides JSON


async def metrics_text(request: Request) -> Response:
    """Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


# What each answers is what the document says of it; a class of response where it is no JSON.
ROUTES: tuple[tuple[str, tuple[str, ...], Callable[..., Any], Any], ...] = (
    ("GET", ("/",), page, HTMLResponse),
    ("GET", ("/stats",), stats, described_state.Stats),
    ("GET", ("/health", "/ready", "/ping"), health, described_state.Healthy),
    ("GET", ("/health_generate",), health_generate, described_state.Healthy),
    ("GET", ("/version",), version, described_state.Version),
    ("GET", ("/metrics",), metrics_text, PlainTextResponse),
    ("GET", ("/v1/models",), models, described_state.ModelList | described_state.AnthropicModels),
    ("GET", ("/v1/models/{id:path}",), model, described_state.ModelObject | described_state.AnthropicModel),
    ("GET", ("/model_info", "/get_model_info"), model_info, described_state.ModelInfo),
    ("GET", ("/server_info", "/get_server_info"), server_info, described_state.ServerInfo),
    ("POST", ("/v1/completions",), completions, described.Completion),
    ("POST", ("/v1/chat/completions",), chat, described.ChatCompletion),
    ("POST", ("/v1/responses",), responses.create, described.ResponseObject),
    ("GET", ("/v1/responses/{id}",), responses.retrieve, described.ResponseObject),
    ("DELETE", ("/v1/responses/{id}",), responses.delete, described.DeletedResponse),
    ("POST", ("/v1/responses/{id}/cancel",), responses.cancel, described.ResponseObject),
    ("POST", ("/v1/messages",), messages, described.MessageObject),
    ("POST", ("/v1/messages/count_tokens",), count_tokens, described.CountedTokens),
    ("POST", ("/generate",), generate, described.Generated | list[described.Generated]),
    ("POST", ("/tokenize", "/v1/tokenize"), tokenize, described.Tokenized),
    ("POST", ("/detokenize", "/v1/detokenize"), detokenize, described.Detokenized),
    ("POST", ("/parse_function_call",), parse_function_call, described.ParsedCalls),
    ("POST", ("/separate_reasoning",), separate_reasoning, described.SeparatedReasoning),
    ("POST", ("/flush_cache",), flush_cache, described.Flushed),
    ("POST", ("/abort_request",), abort_request, described.Aborted),
)


def create_app(
    client: EngineClient, tokenizer: Tokenizer, engine_config: EngineConfig | None = None, server_config: ServerConfig | None = None
) -> FastAPI:
    """`app.state.service.draining` may be set later: new requests and /health then get 503. Raises ConfigError for options that do not
    fit the tokenizer."""
    app = FastAPI(
        title="mtpserve",
        version=__version__,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    config = server_config or ServerConfig()
    metrics = Metrics(client, config.dialects)
    defaults = default_variables(config, tokenizer)
    app.state.service = Service(client, tokenizer, metrics, int(time()), engine_config or EngineConfig(), config, defaults)
    app.state.responses = ResponseStore()
    # The last one is the outermost: even a refusal has an id, and a browser may read it.
    app.add_middleware(BodyLimit, limit=config.max_request_bytes)
    app.add_middleware(Keys, keys=config.api_key, admin_keys=config.admin_api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("authorization", "content-type", "x-api-key", "x-request-id"),
            expose_headers=("retry-after", "x-request-id"),
        )
    app.add_middleware(RequestLog)
    add_error_handlers(app)
    for method, paths, endpoint, answer in ROUTES:
        plain = answer in (HTMLResponse, PlainTextResponse)
        said: dict[str, Any] = {} if plain else {"model": answer}
        streamed = STREAMS if endpoint in (completions, chat, generate, messages, responses.create) else {}
        documented = ERRORS | {200: said | streamed}
        kind = answer if plain else JSON
        for path in paths:
            app.add_api_route(path, endpoint, methods=[method], response_model=None, response_class=kind, responses=documented)
    return app
