"""The options of the engine's process, in groups. Values are checked as far as that is possible without the
model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from mtpserve.config.cache import CacheConfig
from mtpserve.config.disaggregation import HOST_GIB, DisaggregationConfig
from mtpserve.config.lora import LoRAConfig
from mtpserve.config.model import ModelConfig
from mtpserve.config.options import option
from mtpserve.config.parallel import CPUConfig, ParallelConfig
from mtpserve.config.scheduler import SchedulerConfig
from mtpserve.config.spec import SpecConfig
from mtpserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    logprobs_mode: str = option(
        "raw_logprobs",
        "raw_logprobs: log-probabilities of the model's logits; processed_logprobs: of the logits "
        "after the request's sampling parameters",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    enable_return_routed_experts: bool = option(
        False,
        "keep which experts each token has, beside its keys and values: requests with "
        "return_routed_experts get them with their answers",
    )
    logits_processors: str | None = option(
        None,
        "custom logits processors: classes module:Class, comma-separated. Each is called for every "
        "sampled token with the tokens before it",
    )


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
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    cpu: CPUConfig = field(default_factory=CPUConfig)
    replica: int = 0
    rank: int = 0
    meeting: str = ""

    def __post_init__(self) -> None:
        role = self.disaggregation.role
        if role is not None and self.cache.disable_radix_cache:
            raise ConfigError(
                "--disable-radix-cache must be left out with --disaggregation-mode, which finds "
                "pages by the keys of the prefix cache"
            )
        if role is not None and self.parallel.spreads:
            raise ConfigError(
                f"--disaggregation-mode must be left out with {self.parallel.spreading}: the engines "
                "compute each step together"
            )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for pages; 0: there is no tier below the device."""
        least = 0 if self.disaggregation.role is None or self.cache.kv_offload_gib else HOST_GIB
        return max(self.cache.host_bytes, int(least * (1 << 30)))


ENGINE_SECTIONS: dict[str, Callable[..., Any]] = {
    name: kind
    for name, kind in get_type_hints(EngineConfig).items()
    if name not in ("replica", "rank", "meeting")
}
