"""How many devices, processes and cores compute."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mtpserve.config.options import check, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many devices and processes compute. Those of peers that are not supported yet are accepted with
    their default."""

    tensor_parallel_size: int = option(
        1,
        "processes that compute each layer of one engine together, each on one GPU, or on a part of "
        "the CPU cores",
        "tp",
        "tp-size",
    )
    pipeline_parallel_size: int = option(1, "pipeline stages: only 1 is supported", "pp", "pp-size")
    data_parallel_size: int = option(
        1, (
            "engines, each with a copy of the model on its own GPUs or CPU cores; a request goes to the "
            "engine that has its prompt's prefix in the cache"
        ), "dp",
        "dp-size",
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False,
        "spread the routed experts over the --data-parallel-size engines; each engine has its own "
        "requests, KV cache and other weights. With --tensor-parallel-size each process of all "
        "engines has whole experts, not a part of every expert",
    )
    enable_dp_attention: bool = option(
        False,
        "SGLang's form of --enable-expert-parallel: --tensor-parallel-size counts the processes of "
        "all engines; each of the --data-parallel-size engines uses an equal part of them",
    )
    expert_parallel_size: int = option(
        1,
        "--enable-expert-parallel as a number: 1 (off), or the number of all engines' processes",
        "ep",
        "ep-size",
    )
    expert_map: str | None = option(
        None,
        "JSON file: for each layer the list of its experts' EP ranks. `mtpserve experts` writes the "
        "file (default: experts in order, evenly)",
    )
    record_expert_load: str | None = option(
        None,
        "file that counts how often each expert of each layer is used; engine 0 writes FILE.0, "
        "engine 1 FILE.1; see `mtpserve experts`",
    )

    engine_restarts: int | None = option(
        None,
        "how often an engine that died is restarted; its requests continue (default: 0 for one "
        "engine, no limit for several)",
    )

    engine_timeout: float = option(
        20.0, (
            "seconds without a heartbeat after which a hanging engine is killed and its stack traces are "
            "logged; 0: never"
        ),
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
        is_divisible = (
            not self.enable_dp_attention
            or self.tensor_parallel_size == 1
            or self.tensor_parallel_size % engines == 0
        )
        allowed = f"1, or a multiple of --data-parallel-size, which is {engines}, with --enable-dp-attention"
        check(is_divisible, "tensor_parallel_size", self.tensor_parallel_size, allowed)
        check(
            self.pipeline_parallel_size == 1,
            "pipeline_parallel_size",
            self.pipeline_parallel_size,
            "1: pipeline parallelism is not supported; use --tensor-parallel-size",
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
                "used with --enable-expert-parallel and several engines only",
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
        """True if engines share a model's experts."""
        return self.spreading is not None and self.data_parallel_size > 1

    @property
    def by_rank(self) -> bool:
        """True if each of an engine's processes has some experts whole."""
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
        None,
        "threads of each engine process (default: one per core, or OMP_NUM_THREADS; fewer while "
        "other processes use the cores)",
    )
    cpu_affinity: str | None = option(
        None,
        "cores of the engine process, like 0-7,16-23. If all are on one NUMA node, the weights are "
        "stored there too (default: all cores)",
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
        for core_range in self.cpu_affinity.split(","):
            first, dash, last = core_range.strip().partition("-")
            last = last if dash else first
            good = first.isdecimal() and last.isdecimal() and int(first) <= int(last)
            check(good, "cpu_affinity", self.cpu_affinity, "numbers of cores, like 0-7,16-23")
            cores.update(range(int(first), int(last) + 1))
        return frozenset(cores)
