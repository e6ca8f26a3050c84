"""The front end's options."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any

from mtpserve.config.options import check, option
from mtpserve.core.logs import LOG_FORMATS
from mtpserve.core.sampling import MAX_COUNT, MAX_LOGPROBS

TRACES_ENDPOINT = "localhost:4317"
# host:port, or a URL
ENDPOINT = re.compile(r"((https?|grpcs?)://)?([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/\S*)?", re.ASCII)
ROOT_PATH = re.compile(r"(/[\w.~%-]+)+", re.ASCII)
DIALECTS = ("sglang", "vllm")  # whose names for metrics can be offered too

AUTO, NONE = "auto", "none"
# The names in text/parsers/registry.py, which this layer cannot import; a test compares them.
TOOL_CALL_PARSERS = (
    AUTO, NONE, "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseekv3", "deepseekv31",
    "deepseekv32", "deepseekv4",
    "ernie45", "gemma4", "glm", "glm45", "glm47", "gpt-oss", "granite4", "hermes", "lfm2", "llama3",
    "llama3_json", "llama4_pythonic", "longcat", "longcat_xml", "mimo",
    "minimax-m2", "minimax_m2",
    "mistral", "openai", "pythonic", "qwen", "qwen25", "qwen3_coder", "qwen3_xml", "step3p5",
)  # fmt: skip
REASONING_PARSERS = (
    AUTO, NONE, "deepseek-r1", "deepseek-v3", "deepseek-v4", "deepseek_r1", "deepseek_v3", "deepseek_v4",
    "ernie45", "gemma4", "glm45", "glm47", "gpt-oss", "longcat", "mimo", "minimax", "minimax_m2", "nano_v3",
    "nemotron_3", "nemotron_v3",
    "openai_gptoss", "qwen3", "qwen3-thinking", "step3p5",
)  # fmt: skip

# SGLang's and DeepSeek's name, vLLM's name, or both: clients that add up both then show all of it twice
REASONING_FIELDS = ("reasoning_content", "reasoning", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(30000, "port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = option(
        (),
        "API keys, comma-separated, or give the option several times. Other users of the machine can "
        "see them with ps; prefer --api-key-file",
        secret=True,
    )
    api_key_file: str | None = option(None, "file with API keys, one per line")
    admin_api_key: tuple[str, ...] = option(
        (), "API keys for the management routes (default: those of --api-key)", secret=True
    )
    admin_api_key_file: str | None = option(
        None, "file with API keys for the management routes, one per line"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "origins (CORS) whose web pages may call the API; *: any (default: none)"
    )
    root_path: str = option(
        "",
        "path prefix of a proxy, like /api; requests may come with or without it (default: none)",
        "fastapi-root-path",
    )
    ssl_keyfile: str | None = option(None, "file with the private key, for HTTPS")
    ssl_keyfile_password: str | None = option(None, "password of the private key", secret=True)
    ssl_certfile: str | None = option(None, "file with the certificate chain, for HTTPS")
    ssl_ca_certs: str | None = option(
        None,
        (
            "file with CA certificates; clients must present a certificate that one of these CAs signed "
            "(mutual TLS)"
        ),
    )
    max_request_bytes: int = option(
        8 << 20, "maximum size of a request's body, in bytes; larger requests get HTTP 413"
    )
    queue_timeout: float | None = option(
        None,
        ("seconds that a request may wait for its first token; then it gets HTTP 503 (default: no limit)"),
    )
    request_timeout: float | None = option(
        None,
        (
            "seconds that a request may take; then it gets HTTP 408, or an error in its stream (default: "
            "no limit)"
        ),
    )
    read_timeout: float = option(60.0, "seconds in which a client must send its whole request")
    write_timeout: float = option(
        60.0, "seconds that a client may pause reading its response; then the connection is closed"
    )
    sse_keep_alive_interval: float = option(
        0.0,
        (
            "seconds without an event after which a stream sends a comment, to keep the connection open; "
            "0: never"
        ),
    )
    clamp_max_tokens: bool = option(
        True,
        "chat and responses APIs: reduce a max_tokens that exceeds the rest of the context, instead "
        "of refusing the request",
    )
    max_logprobs: int = option(
        MAX_LOGPROBS,
        "maximum number of log-probabilities per token that a request may ask for; -1: the whole vocabulary",
    )
    enable_force_include_usage: bool = option(
        False,
        "send token usage at the end of every stream of the completions and chat APIs",
        "stream-response-default-include-usage",
    )
    return_tokens_as_token_ids: bool = option(
        False, "show tokens as ids in log-probabilities, unless a request says otherwise"
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "serve GET /tokenizer_info: the tokenizer's configuration and the chat template"
    )
    log_requests: bool = option(False, "log requests, including their prompts", "enable-log-requests")
    log_level: str = option(
        "info",
        "least severe level that is logged: debug, info, warning or error",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "text", "text, or json: one object a line, in all processes", choices=LOG_FORMATS
    )
    log_interval: float = option(
        5.0,
        "seconds between two log lines with statistics while requests run; 0: no such lines",
        "decode-log-interval-seconds",
    )
    drain_timeout: float = option(
        30.0, "seconds that running requests have to finish after SIGTERM", "shutdown-timeout"
    )
    drain_delay: float = option(
        0.0,
        "after SIGTERM, answer 503 on /health for this many seconds but still accept requests, so "
        "that load balancers can move away first",
    )
    enable_metrics: bool = option(False, "no effect: /metrics is always served")
    metrics_compat: str | None = option(
        None, "also serve metrics under the names of other servers: sglang, vllm, or sglang,vllm"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send a trace of each request to this OpenTelemetry collector, like http://localhost:4317; needs "
        "pip install 'mtpserve[otlp]'",
    )
    enable_trace: bool = option(
        False, f"send traces, to {TRACES_ENDPOINT} unless --otlp-traces-endpoint names another collector"
    )
    profile_dir: str | None = option(
        None,
        "folder for the traces of /start_profile (default: VLLM_TORCH_PROFILER_DIR or "
        "SGLANG_TORCH_PROFILER_DIR)",
    )
    tool_call_parser: str = option(
        AUTO,
        "format in which the model writes tool calls, for tool_choice auto; auto: from the chat "
        "template or the model family",
        choices=TOOL_CALL_PARSERS,
    )
    enable_auto_tool_choice: bool = option(
        False, "no effect: tool calls are parsed unless --tool-call-parser is none"
    )
    default_chat_template_kwargs: str | None = option(
        None,
        "default values of the chat template's variables, which a request may override: JSON, like "
        '{"enable_thinking": false}',
    )
    reasoning_parser: str = option(
        AUTO,
        "format in which the model marks its reasoning; auto: from the chat template or the model family",
        choices=REASONING_PARSERS,
    )
    reasoning_field: str = option(
        "reasoning_content",
        "field for the reasoning in chat streams: reasoning_content, reasoning or both; answers that "
        "are not streamed have both fields",
        choices=REASONING_FIELDS,
    )

    def __post_init__(self) -> None:
        check(0 <= self.port < 65536, "port", self.port, "in [0, 65535]")
        check(
            -1 <= self.max_logprobs <= MAX_COUNT,
            "max_logprobs",
            self.max_logprobs,
            "at least 0, or -1 for the whole vocabulary",
        )
        check(
            not self.root_path or bool(ROOT_PATH.fullmatch(self.root_path)),
            "root_path",
            self.root_path,
            "a path like /api",
        )
        check(self.log_interval >= 0, "log_interval", self.log_interval, "at least 0")
        check(self.drain_timeout >= 0, "drain_timeout", self.drain_timeout, "at least 0")
        check(self.drain_delay >= 0, "drain_delay", self.drain_delay, "at least 0")
        is_valid = set(self.dialects) <= set(DIALECTS) and (
            self.metrics_compat is None or bool(self.dialects)
        )
        check(is_valid, "metrics_compat", self.metrics_compat, "sglang, vllm or sglang,vllm")
        endpoint = self.otlp_traces_endpoint
        check(
            endpoint is None or bool(ENDPOINT.fullmatch(endpoint)),
            "otlp_traces_endpoint",
            endpoint,
            "host:port, or a URL that begins with http, https, grpc or grpcs",
        )
        check(self.max_request_bytes >= 1, "max_request_bytes", self.max_request_bytes, "at least 1")
        check(
            self.sse_keep_alive_interval >= 0,
            "sse_keep_alive_interval",
            self.sse_keep_alive_interval,
            "at least 0",
        )
        _ = self.template_kwargs
        is_allowed = self.tool_call_parser != NONE or not self.enable_auto_tool_choice
        check(is_allowed, "enable_auto_tool_choice", True, "left out with --tool-call-parser none")
        for name in ("queue_timeout", "request_timeout", "read_timeout", "write_timeout"):
            check(
                getattr(self, name) is None or getattr(self, name) > 0, name, getattr(self, name), "above 0"
            )
        check(
            (self.ssl_keyfile is None) == (self.ssl_certfile is None),
            "ssl_keyfile",
            self.ssl_keyfile,
            "given together with --ssl-certfile",
        )
        check(
            self.ssl_keyfile_password is None or self.ssl_keyfile is not None,
            "ssl_keyfile",
            None,
            "given together with --ssl-keyfile-password",
        )
        check(
            self.ssl_ca_certs is None or self.ssl_certfile is not None,
            "ssl_ca_certs",
            self.ssl_ca_certs,
            "given together with --ssl-certfile",
        )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Raises ConfigError for text that is not a JSON object."""
        text = self.default_chat_template_kwargs or "{}"
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        check(isinstance(values, dict), "default_chat_template_kwargs", text, "a JSON object")
        return dict(values)

    @property
    def traces_endpoint(self) -> str | None:
        """The collector that gets traces. None: none are sent."""
        return self.otlp_traces_endpoint or (TRACES_ENDPOINT if self.enable_trace else None)

    @property
    def dialects(self) -> tuple[str, ...]:
        """The members of DIALECTS whose names for metrics are offered too."""
        return tuple(
            dict.fromkeys(name.strip() for name in (self.metrics_compat or "").split(",") if name.strip())
        )

    def public(self) -> dict[str, Any]:
        """The values of all options that are not secret."""
        return {
            entry.name: getattr(self, entry.name) for entry in fields(self) if not entry.metadata["secret"]
        }
