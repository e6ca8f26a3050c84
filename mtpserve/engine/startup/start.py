"""The engine process's way to `build.py`: what can be known sooner is looked at before, and what only shows
in a step, after.

Importing torch takes seconds: a checkpoint that its headers give away is refused before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpserve.config import EngineConfig
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf import read_config

if TYPE_CHECKING:
    from mtpserve.engine.engine import Engine


def build_engine(config: EngineConfig, *, progress: bool = False) -> Engine:
    """Raises LoadError and ConfigError."""
    read_config(config.model.directory)
    if config.model.load_format != "dummy":
        Checkpoint.open(config.model.directory)
    from mtpserve.engine.startup.build import build_engine as build
    from mtpserve.engine.startup.compute import compiles

    engine = build(config, progress=progress)
    engine.try_out(compiles(config))
    engine.ticks.finish()
    return engine
