"""What the folder needs of the engine: it measures steps and drafts with requests of its own."""

from __future__ import annotations

from typing import Protocol

from mtpserve.core.request import ModelCard, Request, TokenEvent
from mtpserve.engine.depth.policy import DepthPolicy


class EngineControl(Protocol):
    context_length: int
    card: ModelCard

    @property
    def has_work(self) -> bool: ...

    @property
    def policy(self) -> DepthPolicy | None: ...

    def add(self, request: Request, compiled: bool = False) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[TokenEvent]: ...

    def reset_prefix_cache(self) -> None: ...
