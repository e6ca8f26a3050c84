"""Everything that can be configured, as frozen dataclasses: the command line, YAML files and `LLM(...)` all fill these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpserve.config.engine import (
    CacheConfig,
    CPUConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SamplingConfig,
    SchedulerConfig,
    SpecConfig,
)
from mtpserve.config.server import ServerConfig

SECTIONS: dict[str, Callable[..., Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "spec": SpecConfig,
    "sampling": SamplingConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "cpu": CPUConfig,
    "server": ServerConfig,
}

__all__ = [
    "SECTIONS",
    "CPUConfig",
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpecConfig",
]
