"""An engine pauses between two steps: it holds its requests and computes nothing, while operators change
weights or need the device."""

from __future__ import annotations

from mtpserve.core.protocols.control import ContinueGeneration, PauseGeneration, Reply
from mtpserve.engine.engine import Engine


class Pauses:
    """Registers itself with the engine's controls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.controls.add(PauseGeneration, self.pause)
        engine.controls.add(ContinueGeneration, self.resume)

    def pause(self, call: PauseGeneration) -> Reply:
        """May be repeated, with another mode: who is retracted already stays so."""
        if call.mode != "in_place":
            self._engine.retract()
        self._engine.stats.paused = 1
        return Reply()

    def resume(self, _: ContinueGeneration) -> Reply:
        self._engine.stats.paused = 0
        return Reply()
