"""Where traces are sent, and what is said where OpenTelemetry is not installed. Needs no OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError
from mtpserve.server.observe.tracing import require_tracing
from tests.server.forked import ROOT


@pytest.mark.parametrize(("options", "endpoint"), [
    ({}, None),
    ({"enable_trace": True}, "localhost:4317"),
    ({"otlp_traces_endpoint": "http://a:4318"}, "http://a:4318"),
    ({"otlp_traces_endpoint": "[::1]:1", "enable_trace": True}, "[::1]:1"),
])  # fmt: skip
def test_where_traces_go(options: dict[str, Any], endpoint: str | None) -> None:
    assert ServerConfig(**options).traces_endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["", "ftp://a", "a b", "http://", "localhost:port"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint must be host:port, or a URL .* got"):
        ServerConfig(otlp_traces_endpoint=endpoint)


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_tracing(ServerConfig())
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint a:1 needs OpenTelemetry: pip install 'mtpserve\[otlp\]'"):
        require_tracing(ServerConfig(otlp_traces_endpoint="a:1"))


def test_without_the_option_nothing_of_it_is_imported() -> None:
    script = (
        "import sys, mtpserve.server.app\n"
        "from mtpserve.config import ServerConfig\n"
        "from mtpserve.server.observe.tracing import require_tracing\n"
        "require_tracing(ServerConfig())\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'grpc'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
