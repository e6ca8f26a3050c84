"""An engine's weights change between two steps, and with them all that was computed from them."""

from __future__ import annotations

from mtpserve.core.protocols.control import Reply, SetWeightVersion
from mtpserve.engine.engine import Engine


class WeightUpdates:
    """Registers itself with the engine's controls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.controls.add(SetWeightVersion, self.set_version)

    def set_version(self, call: SetWeightVersion) -> Reply:
        """The name alone changes."""
        self._engine.weight_version = call.weight_version
        return Reply()
