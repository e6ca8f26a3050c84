"""OpenTelemetry traces: a span for each request, whose children are its queue, its prompt and its decoding.
Attributes have vLLM's names; what vLLM has no name for is named as the metrics are.

    client's span (traceparent)
    └── llm_request   from arrival to the last token
        ├── queue     until the engine gave it a seat
        ├── prompt    until its first token
        └── decode    until its last token: steps, and what was accepted

OpenTelemetry is imported here alone, where --otlp-traces-endpoint asks for it. It reads its own variables of
the environment: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and so on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import time_ns
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mtpserve import __version__
from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.logs import REQUEST_ID
from mtpserve.server.observe.metrics import acceptance_of
from mtpserve.server.observe.observed import Observed

NAME = "mtpserve"
GRPC, HTTP = "grpc", "http/protobuf"
HTTP_PORT = 4318  # a collector's for HTTP; 4317 is its port for gRPC
TRACES_PATH = "/v1/traces"
FLUSH_MS = 3000  # for the last spans, when the server ends


def require_tracing(config: ServerConfig) -> None:
    """Raises ConfigError if traces are wanted and cannot be sent."""
    if (endpoint := config.traces_endpoint) is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint} needs OpenTelemetry: pip install 'mtpserve[otlp]'"
        ) from error
    protocol_of(endpoint, os.environ)


def protocol_of(endpoint: str, environment: Mapping[str, str]) -> str:
    """GRPC or HTTP: as OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says, or by the endpoint's port and path. Raises
    ConfigError for another protocol."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := environment.get(name)) is not None:
            if protocol not in (GRPC, HTTP):
                raise ConfigError(f"{name} must be {GRPC} or {HTTP}, got {protocol!r}")
            return protocol
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    return HTTP if parts.port == HTTP_PORT or parts.path.strip("/") else GRPC


def exporter_of(endpoint: str) -> Any:
    """Returns the SpanExporter. An endpoint without TLS in its scheme is sent to in clear text, unless
    OTEL_EXPORTER_OTLP_TRACES_INSECURE is false."""
    scheme, separator, rest = endpoint.partition("://")
    host = rest if separator else endpoint
    is_secure = separator and scheme in ("https", "grpcs")
    if protocol_of(endpoint, os.environ) == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HTTPExporter

        path = "" if urlsplit(f"//{host}").path.strip("/") else TRACES_PATH
        return HTTPExporter(endpoint=f"{'https' if is_secure else 'http'}://{host.rstrip('/')}{path}")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_INSECURE", str(not is_secure)).lower() == "true"
    return OTLPSpanExporter(endpoint=host, insecure=insecure)


class Tracing:
    """Spans of all requests, on their way to a collector. Sending is a thread's work, and what it cannot send
    is dropped."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry import context, propagate, trace
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: NAME}))
        # of this app alone: a program that it is a part of may have another
        self.provider = TracerProvider(resource=resource)
        self.provider.add_span_processor(BatchSpanProcessor(exporter_of(endpoint)))
        self.tracer = self.provider.get_tracer(NAME, __version__)
        self.context, self.propagate, self.trace, self.model = context, propagate, trace, model

    def request(self, route: str) -> RequestTrace:
        """The observer of a request of this context."""
        return RequestTrace(self, route)

    def close(self) -> None:
        """Sends what is left, for FLUSH_MS at most."""
        self.provider.force_flush(FLUSH_MS)
        self.provider.shutdown()


def tracing_of(config: ServerConfig, model: str) -> Tracing | None:
    """None: no traces are wanted. Raises ConfigError as require_tracing does."""
    require_tracing(config)
    return None if config.traces_endpoint is None else Tracing(config.traces_endpoint, model)


class TraceContext:
    """ASGI middleware: spans of a request are children of the span that its `traceparent` names."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        context = self._tracing.context
        token = context.attach(self._tracing.propagate.extract(dict(Headers(scope=scope))))
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)


class RequestTrace:
    """Counts one request's steps, and makes its spans when it has ended."""

    def __init__(self, tracing: Tracing, route: str) -> None:
        self._tracing, self._route = tracing, route
        self._parent, self._http_id = tracing.context.get_current(), REQUEST_ID.get()
        self._steps = 0

    def first_token(self, seconds: float, engine: int) -> None:
        pass

    def step(self, seconds: float, tokens: int, engine: int) -> None:
        self._steps += 1

    def end(self, observed: Observed) -> None:
        trace, tracer = self._tracing.trace, self._tracing.tracer
        end = time_ns()
        start = end - nanoseconds(observed.seconds)
        root = tracer.start_span(
            "llm_request",
            self._parent,
            trace.SpanKind.SERVER,
            self._request_attributes(observed),
            start_time=start,
        )
        if observed.outcome in ("error", "rejected"):
            root.set_status(trace.StatusCode.ERROR, observed.error)
        if root.is_recording() and observed.first_token is not None:
            inside = trace.set_span_in_context(root, self._parent)
            for name, begins, ends, attributes in self._phases(observed, start):
                span = tracer.start_span(name, inside, attributes=attributes, start_time=begins)
                span.end(ends)
        root.end(end)

    def _request_attributes(self, observed: Observed) -> dict[str, Any]:
        request, sampling = observed.request, observed.request.sampling
        values: dict[str, Any] = {
            "gen_ai.response.model": self._tracing.model,
            "gen_ai.request.id": request.id,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.n": request.choices or None,
            "gen_ai.request.stream": observed.streaming,
            "gen_ai.usage.prompt_tokens": len(request.prompt),
            "gen_ai.usage.cached_tokens": observed.cached,
            "gen_ai.usage.completion_tokens": observed.tokens,
            "gen_ai.response.finish_reasons": [observed.outcome],
            "gen_ai.latency.e2e": observed.seconds,
            "gen_ai.latency.time_to_first_token": observed.first_token,
            "http.route": self._route or None,
            "http.request.header.x-request-id": [self._http_id] if self._http_id else None,
            "mtpserve.engine": observed.engine,
            "error.type": observed.error_type or None,
            **self._decode_attributes(observed),
        }
        if observed.first_token is not None:
            values["gen_ai.latency.time_in_model_decode"] = observed.decoding
        if observed.times is not None:
            values["gen_ai.latency.time_in_queue"] = observed.times.queued
            values["gen_ai.latency.time_in_model_prefill"] = observed.times.prompt
            values["gen_ai.latency.time_in_model_inference"] = observed.times.prompt + observed.decoding
        return {name: value for name, value in values.items() if value is not None}

    def _decode_attributes(self, observed: Observed) -> dict[str, Any]:
        """Steps after the first token, and what was accepted in verifications."""
        values = {f"{NAME}.{name}": value for name, value in acceptance_of(observed).items()}
        return {f"{NAME}.decode_steps": self._steps, **values}

    def _phases(self, observed: Observed, start: int) -> list[tuple[str, int, int, dict[str, Any]]]:
        """Name, begin and end of each child, in nanoseconds since 1970, and its attributes. The engine's own
        times end at the first token: what comes before them is the front end's work."""
        first = start + nanoseconds(observed.first_token or 0.0)
        phases: list[tuple[str, int, int, dict[str, Any]]] = []
        if observed.times is not None:
            seated = max(start, first - nanoseconds(observed.times.prompt))
            queued = max(start, seated - nanoseconds(observed.times.queued))
            prompt = {
                "gen_ai.usage.prompt_tokens": len(observed.request.prompt),
                "gen_ai.usage.cached_tokens": observed.cached,
            }
            phases = [("queue", queued, seated, {}), ("prompt", seated, first, prompt)]
        decode = {"gen_ai.usage.completion_tokens": observed.tokens, **self._decode_attributes(observed)}
        return [*phases, ("decode", first, first + nanoseconds(observed.decoding), decode)]


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
