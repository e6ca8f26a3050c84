"""The options of `mtpserve bench serve`, named as in SGLang's bench_serving and vLLM's bench serve; from them
the records of bench/."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from mtpserve.cli.parser import Parser
from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.dataset.asked import DatasetOptions
from mtpserve.tools.bench.dataset.datasets import DATASETS
from mtpserve.tools.bench.serve.bench_peers import CHAT, COMPLETIONS, NATIVE, PORT, VLLM_PORT
from mtpserve.tools.bench.serve.client import Target
from mtpserve.tools.bench.serve.show import NAMES
from mtpserve.tools.bench.serve.summary import SummaryOptions, goodput_of, percentiles_of
from mtpserve.tools.bench.serve.sweep import sweep_of

SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
DEFAULTS = DatasetOptions()


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve bench serve",
        usage="%(prog)s [--base-url URL] [--dataset-name NAME] [options]",
        description=(
            "Benchmark a server with OpenAI's API: throughput, latencies, acceptance and cost, as "
            "docs/bench.md defines them. The options have SGLang's and vLLM's names."
        ),
    )
    of_server(arg_parser)
    of_dataset(arg_parser)
    of_load(arg_parser)
    of_requests(arg_parser)
    of_report(arg_parser)
    return arg_parser


def of_server(arg_parser: Parser) -> None:
    group = arg_parser.add_argument_group("server")
    names = (*COMPLETIONS, *CHAT)
    help = (
        f"API: /v1/completions ({', '.join(COMPLETIONS)}) or /v1/chat/completions ({', '.join(CHAT)}) "
        "(default: openai)"
    )
    group.add_argument(
        "--backend", "--endpoint-type", choices=names, default="openai", metavar="NAME", help=help
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="URL of the server, instead of --host and --port",
    )
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    port = f"(default: {PORT}; {VLLM_PORT} with --backend vllm, vllm-chat)"
    group.add_argument("--port", metavar="N", type=int, help=port)
    group.add_argument("--endpoint", metavar="PATH", help="path of the API (default: the backend's)")
    group.add_argument(
        "--model",
        metavar="NAME",
        help="name of the model in requests (default: the server's first)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="that name, if --model is the tokenizer's directory",
    )
    tokenizer = "tokenizer: directory or Hugging Face id (default: --model's, or the server's)"
    group.add_argument("--tokenizer", metavar="DIR", help=tokenizer)
    group.add_argument(
        "--api-key", metavar="KEY", help="API key, sent as a bearer token (default: OPENAI_API_KEY)"
    )
    group.add_argument(
        "--header",
        metavar="NAME=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="HTTP headers of every request",
    )
    group.add_argument("--insecure", action="store_true", help="do not verify TLS certificates")
    ready = "seconds to wait for the server; 0: do not wait (default: 60)"
    group.add_argument("--ready-check-timeout-sec", metavar="X", type=float, default=60.0, help=ready)
    group.add_argument(
        "--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-up"
    )


def add_number(
    group: Any, *names: str, help: str, default: int | None = None, shown: str | None = None
) -> None:
    note = shown if shown is not None else f"(default: {default})" if default is not None else ""
    group.add_argument(
        *(f"--{name}" for name in names),
        metavar="N",
        type=int,
        default=default,
        help=f"{help} {note}".strip(),
    )


def of_dataset(arg_parser: Parser) -> None:
    group = arg_parser.add_argument_group("prompts and answers (lengths in tokens)")

    number = partial(add_number, group)
    names = (*DATASETS, "spec_bench", "gsp")
    group.add_argument(
        "--dataset-name",
        choices=names,
        default="random",
        metavar="NAME",
        help=f"dataset: {', '.join(DATASETS)} (default: random)",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help=("file with the dataset; random and multi-turn may use ShareGPT's"),
    )
    number(
        "num-prompts",
        "num-prompt",
        help="number of conversations, or of requests of one turn",
        default=DEFAULTS.num_prompts,
    )
    number(
        "seed",
        help="seed of prompts, lengths and times",
        default=DEFAULTS.seed,
    )
    number(
        "random-input-len", "random-input", help="length of random prompts", default=DEFAULTS.random_input_len
    )
    number(
        "random-output-len",
        "random-output",
        help="maximum length of answers to random prompts",
        shown="(default: 128; 1024 with --backend sglang*)",
    )
    number(
        "random-prefix-len",
        help="length of a common prefix, in addition to --random-input-len",
        default=0,
    )
    ratio = (
        "lengths vary from (1 - X) to (1 + X) times the length; with --backend sglang* from X to 1 "
        "times (default: 0)"
    )
    group.add_argument(
        "--random-range-ratio",
        metavar="X",
        type=float,
        help=f"{ratio}; otherwise they are equal",
    )
    add_lengths(group)


def add_lengths(group: Any) -> None:
    """The lengths and turns of each kind of dataset."""
    number = partial(add_number, group)
    number("sharegpt-output-len", help="length of answers (default: as in the file)")
    number(
        "sharegpt-context-len",
        help="maximum length of a conversation",
    )
    number(
        "custom-output-len",
        help="length of answers (default: the file's output_tokens, or 256)",
    )
    number(
        "spec-bench-output-len",
        help="length of answers to spec-bench questions",
        default=DEFAULTS.spec_bench_output_len,
    )
    group.add_argument("--spec-bench-category", metavar="NAME", help="ask only questions of this category")
    number(
        "gsp-num-groups",
        help="number of groups of prompts with a common system prompt",
        default=DEFAULTS.gsp_num_groups,
    )
    number(
        "gsp-prompts-per-group", help="number of prompts in a group", default=DEFAULTS.gsp_prompts_per_group
    )
    number(
        "gsp-system-prompt-len",
        help="length of a group's system prompt",
        default=DEFAULTS.gsp_system_prompt_len,
    )
    number(
        "gsp-question-len",
        help="length of each prompt after the system prompt",
        default=DEFAULTS.gsp_question_len,
    )
    number("gsp-output-len", help="length of answers in these groups", default=DEFAULTS.gsp_output_len)
    number(
        "multi-turn-num-turns",
        help="number of turns of generated conversations",
        default=3,
    )
    pause = "seconds between an answer and the conversation's next turn (default: 0)"
    group.add_argument("--multi-turn-delay", metavar="X", type=float, default=0.0, help=pause)
    group.add_argument(
        "--skip-chat-template",
        action="store_true",
        help="no effect: prompts are always sent without a chat template",
    )


def of_load(arg_parser: Parser) -> None:
    group = arg_parser.add_argument_group("load")
    rate = "conversations per second, at random times (default: inf, all at once)"
    group.add_argument("--request-rate", metavar="X", type=float, default=math.inf, help=rate)
    burstiness = (
        "of the random times: 1: a Poisson process; below 1: in bursts; above: more even (default: 1)"
    )
    group.add_argument("--burstiness", metavar="X", type=float, default=1.0, help=burstiness)
    group.add_argument(
        "--max-concurrency",
        metavar="N",
        type=int,
        help=("maximum number of requests at once; others wait"),
    )
    warm = "short requests before the run (default: 1)"
    group.add_argument("--warmup-requests", "--num-warmups", metavar="N", type=int, default=1, help=warm)
    sweep = "one run per load, like max-concurrency=1,2,4,8 or request-rate=1,2,4"
    group.add_argument("--sweep", metavar="NAME=X,X,...", help=sweep)


def of_requests(arg_parser: Parser) -> None:
    group = arg_parser.add_argument_group("requests")
    group.add_argument(
        "--temperature", metavar="X", type=float, default=0.0, help="sampling temperature (default: 0)"
    )
    for name in SAMPLING:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag,
            metavar="X",
            type=int if name == "top_k" else float,
            help="sampling parameter (default: the server's)",
        )
    ignore = "let answers have their maximum length (default with --backend sglang*)"
    group.add_argument("--ignore-eos", action="store_true", default=None, help=ignore)
    group.add_argument(
        "--disable-ignore-eos", action="store_false", dest="ignore_eos", help="let the model end its answers"
    )
    group.add_argument(
        "--disable-stream",
        "--no-stream",
        action="store_true",
        help="do not stream answers: no TTFT, TPOT and ITL",
    )
    extra = "fields of every request, as a JSON object; they override this program's"
    group.add_argument("--extra-request-body", "--extra-body", metavar="JSON", help=extra)
    group.add_argument(
        "--request-id-prefix",
        metavar="TEXT",
        help="send the header x-request-id with this prefix and a number",
    )


def of_report(arg_parser: Parser) -> None:
    group = arg_parser.add_argument_group("report")
    goodput = "limits of a good request in milliseconds for ttft, tpot and e2el, like ttft:500 tpot:20"
    group.add_argument("--goodput", metavar="NAME:MS", nargs="+", action="extend", default=[], help=goodput)
    group.add_argument(
        "--metric-percentiles",
        metavar="P,P,...",
        default="90,95,99",
        help="percentiles of latencies in the report (default: 90,95,99)",
    )
    metrics = f"latencies in the table (default: {','.join(NAMES)})"
    group.add_argument("--percentile-metrics", metavar="NAME,...", default=",".join(NAMES), help=metrics)
    price = "price of the machine: reports the cost per million input and output tokens"
    group.add_argument("--price-per-hour", metavar="X", type=float, help=price)
    ratio = "price of an output token in input tokens, for the cost (default: 4)"
    group.add_argument("--output-price-ratio", metavar="X", type=float, default=4.0, help=ratio)
    group.add_argument(
        "--plot",
        metavar="FILE",
        help=("file for plots of throughput, latency and acceptance: .png, .svg or .pdf"),
    )
    group.add_argument(
        "--output-file", metavar="FILE", help="file for the results; each run adds one line of JSON"
    )
    details = "add each request's times and text to the results"
    group.add_argument("--output-details", "--save-detailed", action="store_true", help=details)
    group.add_argument(
        "--save-result",
        action="store_true",
        help="write the results to a new JSON file, like vLLM's client",
    )
    group.add_argument(
        "--append-result",
        action="store_true",
        help="add the results to the file of --save-result, if it exists",
    )
    group.add_argument(
        "--result-dir",
        metavar="DIR",
        help="folder for the file of --save-result (default: the current folder)",
    )
    group.add_argument(
        "--result-filename",
        metavar="FILE",
        help="name of the file of --save-result (default: from backend, load, model and date)",
    )
    group.add_argument(
        "--metadata",
        metavar="NAME=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="fields that are added to the results",
    )
    group.add_argument(
        "--tag", metavar="TEXT", help="field `tag` of the results, and part of the file's name"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


@dataclass(frozen=True, slots=True)
class ServeBench:
    """All options, checked. `loads`: the sweep's; one run without a sweep."""

    target: Target
    dataset: DatasetOptions
    summary: SummaryOptions
    swept: str | None  # max-concurrency or request-rate
    loads: tuple[float, ...]
    options: Namespace
    metadata: Mapping[str, str]
    metrics: tuple[str, ...]
    notes: tuple[str, ...]


def bench_of(options: Namespace) -> ServeBench:
    """Raises ConfigError for the first value that makes no sense."""
    check_numbers(options)
    swept, loads = sweep_of(options)
    notes = (
        [f"--backend {options.backend}: /v1/completions is asked, not /generate"]
        if options.backend in NATIVE
        else []
    )
    rated = swept == "request-rate" or (swept is None and math.isfinite(options.request_rate))
    goodput = goodput_of(options.goodput) or None
    summary = SummaryOptions(
        percentiles_of(options.metric_percentiles),
        goodput,
        options.price_per_hour,
        options.output_price_ratio,
        rated,
    )
    metrics = tuple(name.strip() for name in options.percentile_metrics.split(","))
    check(
        set(metrics) <= set(NAMES),
        "percentile_metrics",
        options.percentile_metrics,
        f"of {', '.join(NAMES)}, with commas between them",
    )
    return ServeBench(target_of(options), dataset_of(options), summary, swept, loads, options,
        pairs("metadata", options.metadata), metrics,
                      tuple(notes))  # fmt: skip


def check_numbers(options: Namespace) -> None:
    lengths = [
        field.name
        for field in fields(DatasetOptions)
        if field.name.endswith("_len") and field.name != "random_prefix_len"
    ]
    counts = (
        "num_prompts",
        "gsp_num_groups",
        "gsp_prompts_per_group",
        "multi_turn_num_turns",
        "max_concurrency",
    )
    for name in (*counts, *lengths):
        check((value := getattr(options, name)) is None or value >= 1, name, value, "at least 1")
    for name in (
        "warmup_requests",
        "random_prefix_len",
        "multi_turn_delay",
        "ready_check_timeout_sec",
        "temperature",
    ):
        check(0 <= (value := getattr(options, name)) < math.inf, name, value, "at least 0")
    for name in ("request_rate", "burstiness", "output_price_ratio", "price_per_hour"):
        value = getattr(options, name)
        check(
            value is None or (value > 0 and (name == "request_rate" or value < math.inf)),
            name,
            value,
            "above 0",
        )
    check(options.port is None or 0 < options.port < 65536, "port", options.port, "in [1, 65535]")


def target_of(options: Namespace) -> Target:
    chat = options.backend in CHAT
    port = options.port or (VLLM_PORT if options.backend.startswith("vllm") else PORT)
    url = (options.base_url or f"http://{options.host}:{port}").rstrip("/").removesuffix("/v1")
    check(
        url.startswith(("http://", "https://")),
        "base_url",
        options.base_url,
        "http://HOST:PORT or https://HOST:PORT",
    )
    endpoint = options.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")
    if endpoint.rstrip("/").endswith("chat/completions") != chat:
        fitting = "openai" if chat else "openai-chat"
        raise ConfigError(
            f"--endpoint {endpoint} does not fit --backend {options.backend}: use --backend {fitting}"
        )
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | pairs("header", options.header)
    body: dict[str, Any] = {"temperature": options.temperature}
    body |= {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.ignore_eos or (options.ignore_eos is None and options.backend.startswith("sglang")):
        body["ignore_eos"] = True
    body |= json_object("extra_request_body", options.extra_request_body)
    return Target(url, "/" + endpoint.lstrip("/"), chat, options.served_model_name or options.model,
        not options.disable_stream, body,
                  headers, options.insecure, options.request_id_prefix)  # fmt: skip


def dataset_of(options: Namespace) -> DatasetOptions:
    values = {
        field.name: getattr(options, field.name)
        for field in fields(DatasetOptions)
        if hasattr(options, field.name)
    }
    sglang = options.backend.startswith("sglang")
    output = options.random_output_len or (1024 if sglang else DEFAULTS.random_output_len)
    ratio = options.random_range_ratio if options.random_range_ratio is not None or not sglang else 0.0
    more = {
        "warm": options.warmup_requests,
        "shrinks": sglang,
        "chat": options.backend in CHAT,
        "random_range_ratio": ratio,
    }
    return DatasetOptions(**values | more | {"random_output_len": output})


def pairs(name: str, entries: Sequence[str]) -> dict[str, str]:
    values = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        check(bool(key.strip() and equals), name, entry if name != "header" else key, "NAME=VALUE")
        values[key.strip()] = value.strip()
    return values


def json_object(name: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    check(isinstance(value, dict), name, text, "a JSON object")
    return dict(value)
