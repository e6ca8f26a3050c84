"""An OpenTelemetry collector in this process, over HTTP or gRPC, that keeps the spans which it gets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed: pip install '.[otlp]'")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="its exporters are not installed")

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    inner = getattr(value, kind)
    return [value_of(one) for one in inner.values] if kind == "array_value" else inner


@dataclass
class Span:
    name: str
    id: bytes
    trace: bytes
    parent: bytes
    kind: int
    begin: int  # nanoseconds
    end: int
    attributes: dict[str, Any]
    failed: bool
    status: str


@dataclass
class Collector:
    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            self.resources.append({entry.key: value_of(entry.value) for entry in group.resource.attributes})
            for scope in group.scope_spans:
                self.spans += [
                    Span(
                        span.name, span.span_id, span.trace_id, span.parent_span_id, span.kind,
                        span.start_time_unix_nano, span.end_time_unix_nano,
                        {entry.key: value_of(entry.value) for entry in span.attributes},
                        span.status.code == 2, span.status.message,
                    )
                    for span in scope.spans
                ]  # fmt: skip

    def requests(self) -> list[Span]:
        return [span for span in self.spans if span.name == "llm_request"]

    def children(self, span: Span) -> dict[str, Span]:
        return {child.name: child for child in self.spans if child.parent == span.id}


@contextmanager
def over_http() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.paths.append(self.path)
            found.take(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        try:
            yield found
        finally:
            server.shutdown()


@contextmanager
def over_grpc() -> Iterator[Collector]:
    found = Collector()

    class Servicer:
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            found.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    found.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(None)
