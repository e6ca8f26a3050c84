"""The fake engine, whose grammars `wait for PATH` until somebody writes into that FIFO."""

from __future__ import annotations

from pathlib import Path

from mtpserve.config import EngineConfig
from mtpserve.core.sampling import GrammarSpec
from tests.server.fake_engine import FakeEngine

FACTORY = "tests.engine.fifo_engine:build"


class FifoEngine(FakeEngine):
    def compile(self, spec: GrammarSpec | None) -> None:
        if spec is not None and spec.text.startswith("wait for "):
            Path(spec.text.removeprefix("wait for ")).read_bytes()
            return
        super().compile(spec)


def build(config: EngineConfig, *, progress: bool) -> FifoEngine:
    return FifoEngine("fake", 0.005)
