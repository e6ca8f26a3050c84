"""The adapters that are loaded, in host memory; those that run, in the slots of the layers; and which one
each running request has.

Each rank has its part: A is divided along the inputs and B along the outputs, as the matrix is that they are
added to. What the ranks sum is divided along the inputs, and so is the sum of their products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import torch
from mtpserve_kernels.lora.reference import row_adapters
from torch import Tensor, nn

from mtpserve.core.batch import Batch
from mtpserve.core.errors import LoadError
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.layers.devices.lora import adapters_of
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.weights.checkpoint.lora import AdapterPair, read_adapter
from mtpserve.weights.plan import parts_of
from mtpserve.weights.rules import Rule
from mtpserve.weights.shards import Shard

HostAdapter = dict[str, tuple[Tensor, Tensor]]  # by linear layer: a [parts R, inputs], b [R, outputs]


class DeviceAdapters:
    """`whole`: the model of all ranks, on no device; `shards`: this rank's part of its parameters."""

    def __init__(
        self,
        model: nn.Module,
        whole: nn.Module,
        shards: Mapping[str, Shard],
        rules: Seq[Rule],
        device: torch.device,
        seats: int,
    ) -> None:
        self._layers, self._whole, self._shards, self._rules = adapters_of(model), whole, shards, rules
        first = next(iter(self._layers.values()))
        self._current, (slots, self._rank, _) = first.current, first.b.shape
        self._loaded: dict[int, HostAdapter] = {}  # by lora_int_id
        self._in_slots = [0] * slots  # lora_int_id; 0: nothing
        # the slot of each seat's request, -1: none. One seat more than requests can run pads batches.
        self._slots = torch.full((seats + 1,), -1, dtype=torch.int64, device=device)

    def load(self, request: LoRARequest) -> bytes:
        """Reads an adapter into host memory. Returns its fingerprint. Raises LoadError."""
        files = read_adapter(request.lora_path, self._rules, self._rank)
        adapter: HostAdapter = {}
        for pair in files.pairs:
            self._add(adapter, pair, request.lora_path)
        self._loaded[request.lora_int_id] = adapter
        return files.fingerprint

    def unload(self, lora_int_id: int) -> None:
        """No request has it, and none will."""
        self._loaded.pop(lora_int_id, None)
        self._in_slots = [0 if number == lora_int_id else number for number in self._in_slots]

    def require(self, request: LoRARequest) -> None:
        """Reads it where nobody has: in a recording that is run again. Raises LoadError."""
        if request.lora_int_id not in self._loaded:
            self.load(request)

    def seat(self, requests: Seq[RunnerRequest], req_indices: Tensor, slots: Tensor) -> None:
        """Requests are admitted, each with a slot or -1: `slots` [requests] on the device. What was in a slot
        is overwritten after the steps that were launched, in the device's order."""
        for request in requests:
            lora, slot = request.request.lora, request.new_request.adapter_slot
            if lora is not None and self._in_slots[slot] != lora.lora_int_id:
                self._fill(slot, self._loaded[lora.lora_int_id])
                self._in_slots[slot] = lora.lora_int_id
        self._slots[req_indices] = slots

    def select(self, batch: Batch) -> None:
        """The next pass has these rows."""
        self._current.rows = (
            row_adapters(self._slots[batch.token_req_indices]) if batch.has_adapters else None
        )

    def _fill(self, slot: int, adapter: HostAdapter) -> None:
        for name, layer in self._layers.items():
            for place, side in zip((layer.a, layer.b), adapter.get(name, (None, None)), strict=True):
                if side is None:
                    place[slot].zero_()
                else:
                    place[slot].copy_(side, non_blocking=True)

    def _add(self, adapter: HostAdapter, pair: AdapterPair, path: str) -> None:
        """Puts this rank's part of a pair to its place."""
        layer = self._layers.get(pair.target)
        if layer is None:
            raise LoadError(
                f"{path}: {pair.module}: this layer takes no adapter: linear layers of grouped-query "
                "attention and dense feed-forward blocks do"
            )
        rows, columns = self._shards[f"{pair.target}.weight"].dims
        parts = parts_of(self._whole.get_submodule(pair.target), "weight")
        numbers = range(len(parts)) if pair.part is None else [pair.part]
        first = sum(parts[: numbers[0]])
        end = first + sum(parts[part] for part in numbers)
        if pair.a.shape[1] != columns.whole or pair.b.shape[0] != end - first:
            shapes = f"{list(pair.a.shape)} and {list(pair.b.shape)}"
            raise LoadError(
                f"{path}: {pair.module} has shapes {shapes}, the model needs {columns.whole} inputs and "
                f"{end - first} outputs"
            )
        if pair.target not in adapter:
            empty = [torch.zeros(side.shape[1:], dtype=side.dtype) for side in (layer.a, layer.b)]
            adapter[pair.target] = empty[0], empty[1]
        a, b = adapter[pair.target]
        rank = len(pair.a)
        for part in numbers:
            for stretch in columns.stretches:
                taken, to = stretch.slices
                a[part * self._rank : part * self._rank + rank, to] = pair.a[:, taken]
        for stretch in rows.stretches:
            inside = stretch.inside(first, end)
            if inside is not None:
                taken, to = inside.slices
                b[:rank, to] = pair.b[taken].T
