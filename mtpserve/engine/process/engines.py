"""The engines of a configuration, each in a process of its own: for the server, for `AsyncLLM` and for other
projects."""

from __future__ import annotations

import tempfile
from dataclasses import replace

from mtpserve.config import EngineConfig
from mtpserve.engine.process.client import ProcessClient
from mtpserve.engine.process.process import DEFAULT_FACTORY
from mtpserve.engine.process.replicas import Replicas


def meetings_of(engine: EngineConfig) -> tempfile.TemporaryDirectory[str] | None:
    """A folder in which engines that compute together find each other. None: each is by itself."""
    return tempfile.TemporaryDirectory(prefix="mtpserve-") if engine.parallel.spreads else None


def engines_of(
    engine: EngineConfig,
    meetings: tempfile.TemporaryDirectory[str] | None,
    factory: str = DEFAULT_FACTORY,
    *,
    progress: bool = False,
    log_level: str = "info",
    log_format: str = "text",
) -> Replicas:
    """Returns the engines, not started. `meetings`: their meetings_of. Needs a running event loop."""

    def make(number: int, restarts: int) -> ProcessClient:
        config = replace(
            engine, replica=number, meeting="" if meetings is None else f"{meetings.name}/{restarts}"
        )
        return ProcessClient(
            config,
            factory=factory,
            progress=progress and number == 0,
            log_level=log_level,
            log_format=log_format,
        )

    parallel, seed = engine.parallel, engine.scheduler.random_seed
    return Replicas(
        make, parallel.data_parallel_size, restarts=parallel.restarts, seed=seed, together=parallel.spreads
    )
