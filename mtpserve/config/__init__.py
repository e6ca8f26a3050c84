"""Everything that can be configured, as frozen dataclasses: the command line, YAML files and `LLM(...)` all
fill these."""

from __future__ import annotations

from mtpserve.config.cache import CacheConfig
from mtpserve.config.disaggregation import DisaggregationConfig
from mtpserve.config.engine import ENGINE_SECTIONS, EngineConfig, SamplingConfig
from mtpserve.config.lora import LoRAConfig
from mtpserve.config.model import ModelConfig
from mtpserve.config.parallel import CPUConfig, ParallelConfig
from mtpserve.config.scheduler import SchedulerConfig
from mtpserve.config.server import ServerConfig
from mtpserve.config.spec import SpecConfig

SECTIONS = ENGINE_SECTIONS | {"server": ServerConfig}

__all__ = [
    "ENGINE_SECTIONS",
    "SECTIONS",
    "CPUConfig",
    "CacheConfig",
    "DisaggregationConfig",
    "EngineConfig",
    "LoRAConfig",
    "ModelConfig",
    "ParallelConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpecConfig",
]
