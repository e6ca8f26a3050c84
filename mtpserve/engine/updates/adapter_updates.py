"""Adapters come and go between two steps, in all ranks."""

from __future__ import annotations

from collections.abc import Callable

from mtpserve.config import LoRAConfig
from mtpserve.core.errors import ConfigError, InvalidRequest
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.control import Calls, DropLoRA, LoadLoRA, Reply, UnloadLoRA
from mtpserve.engine.engine import Engine
from mtpserve.engine.parallel.ranks import RankProcesses
from mtpserve.engine.process.controls import Controls
from mtpserve.runtime.lora.device_adapters import DeviceAdapters


def take_adapters(controls: Controls, adapters: DeviceAdapters) -> None:
    """One rank's part: host memory."""

    def load(call: LoadLoRA) -> Reply:
        return Reply(values={"fingerprint": adapters.load(call.request).hex()})

    def drop(call: DropLoRA) -> Reply:
        adapters.unload(call.lora_int_id)
        return Reply()

    controls.add(LoadLoRA, load)
    controls.add(DropLoRA, drop)


class AdapterUpdates:
    """Loads the adapters of the start, and registers with the engine's controls. Raises ConfigError."""

    def __init__(
        self,
        engine: Engine,
        adapters: DeviceAdapters,
        config: LoRAConfig,
        others: RankProcesses | None,
    ) -> None:
        self._engine, controls = engine, Controls()
        take_adapters(controls, adapters)
        self._control: Callable[[Calls], Reply] = controls.take
        if others is not None:
            self._control = lambda call: others.control(call, controls.take)
        engine.adapters.open(config.max_loras, self.load, self.drop)
        engine.controls.add(LoadLoRA, self.take_load)
        engine.controls.add(UnloadLoRA, self.take_unload)
        for request in config.requests:
            try:
                engine.adapters.load(request)
            except InvalidRequest as error:
                raise ConfigError(f"--lora-modules {request.lora_name}: {error}") from None

    def load(self, request: LoRARequest) -> bytes:
        """Raises InvalidRequest; then no rank has it."""
        reply = self._control(LoadLoRA(request))
        if reply.error:
            self._control(DropLoRA(request.lora_int_id))
        return bytes.fromhex(reply.check().values["fingerprint"])

    def drop(self, lora_int_id: int) -> None:
        self._control(DropLoRA(lora_int_id)).check()

    def take_load(self, call: LoadLoRA) -> Reply:
        self._engine.adapters.load(call.request)
        return Reply()

    def take_unload(self, call: UnloadLoRA) -> Reply:
        """Requests that live go on with it."""
        self._engine.adapters.retire(call.lora_int_id)
        return Reply()
