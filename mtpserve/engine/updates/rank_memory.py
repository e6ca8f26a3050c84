"""The memory of one rank, as operators' calls give it back and take it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from mtpserve.core.protocols.control import ReleaseMemory, Reply, ResumeMemory
from mtpserve.engine.process.controls import Controls
from mtpserve.runtime.occupation.storages import Storages
from mtpserve.runtime.runner import Runner
from mtpserve.weights.parts import contents

TABLES = (torch.int64, torch.int32, torch.bool)  # of tokens and places: no update writes them


class RankMemory:
    """Registers itself with the process's controls. `model`: the module whose weights the runner uses; `kv`:
    what it keeps of tokens."""

    def __init__(self, controls: Controls, runner: Runner, model: nn.Module, kv: Seq[Tensor]) -> None:
        self._runner, self._model, self._kv = runner, model, kv
        self._released: dict[str, Storages] = {}
        controls.add(ReleaseMemory, self.release)
        controls.add(ResumeMemory, self.resume)

    def release(self, call: ReleaseMemory) -> Reply:
        """The reply's `bytes`: how many were given back."""
        device = self._runner.req_tensors.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for graphs in (self._runner.graphs, *self._runner.captured.values()):
            if graphs is not None:
                graphs.captured.clear()  # they hold addresses, and are captured again when they are needed
        released = 0
        for tag in call.tags:
            self._released[tag] = self._storages(tag, call.drops_weights)
            released += self._released[tag].release()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return Reply(values={"bytes": released})

    def _storages(self, tag: str, drops_weights: bool) -> Storages:
        if tag == "kv_cache":
            return Storages(self._kv, keep=False)
        return Storages(
            droppable(self._model) if drops_weights else weight_tensors(self._model), keep=not drops_weights
        )

    def resume(self, call: ResumeMemory) -> Reply:
        for tag in call.tags:
            self._released.pop(tag).resume()
        if "kv_cache" in call.tags:
            self._runner.step.stores.clear_last()
        return Reply()


def weight_tensors(module: nn.Module) -> list[Tensor]:
    """All tensors that a module holds, however deep."""
    return [*walk(module, set())]


def droppable(module: nn.Module) -> list[Tensor]:
    """Returns those that an update of all weights writes: neither tables nor what was computed without
    weights, as rotations are."""
    computed = {
        address_of(tensor)
        for part in module.modules()
        if not part._parameters and not hasattr(part, "finish_loading")
        for value in (*part.__dict__.values(), *part._buffers.values())
        for tensor in (walk(value, set()) if not isinstance(value, dict) else ())
    }
    return [
        tensor
        for tensor in weight_tensors(module)
        if tensor.dtype not in TABLES and address_of(tensor) not in computed
    ]


def address_of(tensor: Tensor) -> int:
    """Returns the address of its storage; 0: it is opaque."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def walk(value: Any, done: set[int]) -> Iterator[Tensor]:
    if id(value) in done:
        return
    done.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for part in contents(value).values():
        yield from walk(part, done)
