"""The weights of one rank, as operators' calls change them. Every rank stages an update, and writes it once
all have staged it: an error leaves every rank as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from torch import Tensor

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.control import (
    CheckWeights,
    CommitWeights,
    DropWaiting,
    JoinGroup,
    LeaveGroup,
    ReadWeights,
    Reply,
    StageBroadcast,
    StageCheckpoint,
    StageTensors,
)
from mtpserve.engine.process.controls import Controls
from mtpserve.runtime.parallel.weight_group import WeightGroup
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.update import NamedTensors, ServingWeights, StagedUpdate


class RankWeights:
    """Registers itself with the process's controls. `make` gives the weights when they are first needed; it
    raises InvalidRequest where they cannot change. `open_directory`: reads a
    checkpoint's headers."""

    def __init__(
        self,
        controls: Controls,
        make: Callable[[], ServingWeights],
        open_directory: Callable[[Path], Checkpoint],
        device: torch.device,
        number: int,
    ) -> None:
        """`number`: of the process among the ranks of all engines."""
        self._make, self._open, self._device, self._number = make, open_directory, device, number
        self._groups: dict[str, WeightGroup] = {}
        self._snapshot: dict[str, str] | None = None  # checksums, by name
        self._weights: ServingWeights | None = None
        self._staged: StagedUpdate | None = None
        controls.add(StageTensors, self.stage_bytes)
        controls.add(StageCheckpoint, self.stage_checkpoint)
        controls.add(StageBroadcast, self.stage_broadcast)
        controls.add(JoinGroup, self.join)
        controls.add(LeaveGroup, self.leave)
        controls.add(CommitWeights, self.commit)
        controls.add(ReadWeights, self.read)
        controls.add(CheckWeights, self.check)
        controls.add(DropWaiting, self.drop_waiting)

    @property
    def weights(self) -> ServingWeights:
        if self._weights is None:
            self._weights = self._make()
        return self._weights

    def stage_bytes(self, call: StageTensors) -> Reply:
        """Raises InvalidRequest, LoadError."""
        tensors: dict[str, Tensor] = {}
        for data in call.data:
            try:
                tensors |= tensors_of(data)
            except SafetensorError as error:
                raise InvalidRequest(f"the tensors are no safetensors file: {error}") from error
        return self.stage_tensors(tensors)

    def stage_tensors(self, tensors: Mapping[str, Tensor]) -> Reply:
        """Raises InvalidRequest, LoadError."""
        return self._reply(self.weights.stage_tensors(NamedTensors(tensors)))

    def stage_checkpoint(self, call: StageCheckpoint) -> Reply:
        """Raises InvalidRequest, LoadError."""
        weights = self.weights
        return self._reply(weights.stage_checkpoint(self._open(Path(call.model_path)), call.prefix))

    def stage_broadcast(self, call: StageBroadcast) -> Reply:
        """Raises InvalidRequest, LoadError."""
        dtypes = [dtype_of(name) for name in call.dtypes]
        if not len(call.names) == len(dtypes) == len(call.shapes):
            lengths = f"{len(call.names)} names, {len(dtypes)} dtypes and {len(call.shapes)} shapes"
            raise InvalidRequest(f"each tensor needs all three, got {lengths}", "names")
        group = self._group(call.group_name)
        return self.stage_tensors(group.receive(call.names, dtypes, call.shapes, self._device))

    def join(self, call: JoinGroup) -> Reply:
        """Raises InvalidRequest."""
        if call.group_name in self._groups:
            raise InvalidRequest(f"group_name: the group {call.group_name!r} exists already", "group_name")
        rank = call.rank_offset + self._number
        if not 0 < rank < call.world_size:
            there = f"the trainer is rank 0, and this would be rank {rank} of {call.world_size}"
            raise InvalidRequest(f"rank_offset: {there}", "rank_offset")
        self._groups[call.group_name] = WeightGroup(
            call.master_address, call.master_port, rank, call.world_size, call.group_name, call.backend
        )
        return Reply()

    def leave(self, call: LeaveGroup) -> Reply:
        """Raises InvalidRequest."""
        self._group(call.group_name).close()
        del self._groups[call.group_name]
        return Reply()

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise InvalidRequest(f"group_name: there is no group {name!r}: join one first", "group_name")
        return self._groups[name]

    def _reply(self, staged: StagedUpdate) -> Reply:
        self._staged = staged
        count = sum(len(part.parameters) for part in staged.placements)
        return Reply(values={"waiting": list(staged.waiting), "parameters": count})

    def commit(self, call: CommitWeights) -> Reply:
        staged, self._staged = self._staged, None
        if call.write and staged is not None:
            self.weights.commit(staged)
        return Reply()

    def read(self, call: ReadWeights) -> Reply:
        """Raises LoadError."""
        return Reply(values={"parameter": self.weights.read(call.name, call.rows)})

    def check(self, call: CheckWeights) -> Reply:
        """Raises InvalidRequest where weights are not those of the snapshot."""
        sums = {name: checksum(tensor) for name, tensor in self.weights.tensors()}
        if call.action == "snapshot":
            self._snapshot = sums
        if call.action == "compare":
            if self._snapshot is None:
                raise InvalidRequest("action: there is no snapshot to compare with", "action")
            changed = [name for name, value in sums.items() if self._snapshot.get(name) != value]
            if changed:
                shown = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
                differ = f"weights differ from the snapshot: {len(changed)} ({shown})"
                raise InvalidRequest(f"action: {differ}", "action")
        return Reply(values={"checksums": sums if call.action == "checksum" else {}})

    def drop_waiting(self, call: DropWaiting) -> Reply:
        self.weights.waiting.clear()
        return Reply()


def checksum(tensor: Tensor) -> str:
    dense = tensor.detach().to_dense() if tensor.is_mkldnn else tensor.detach()
    data = dense.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return blake2b(data, digest_size=16).hexdigest()


def dtype_of(name: str) -> torch.dtype:
    """Raises InvalidRequest."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise InvalidRequest(f"dtypes: torch has no dtype {name!r}", "dtypes")
