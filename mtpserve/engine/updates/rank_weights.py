"""The weights of one rank, as operators' calls change them. Every rank stages an update, and writes it once
all have staged it: an error leaves every rank as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from torch import Tensor

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.control import CommitWeights, DropWaiting, Reply, StageCheckpoint, StageTensors
from mtpserve.engine.process.controls import Controls
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.layouts import with_mtp_layers
from mtpserve.weights.update import NamedTensors, ServingWeights, StagedUpdate


class RankWeights:
    """Registers itself with the process's controls. `make` gives the weights when they are first needed; it
    raises InvalidRequest where they cannot change. `num_layers`: of the trunk."""

    def __init__(self, controls: Controls, make: Callable[[], ServingWeights], num_layers: int) -> None:
        self._make, self._num_layers = make, num_layers
        self._weights: ServingWeights | None = None
        self._staged: StagedUpdate | None = None
        controls.add(StageTensors, self.stage_bytes)
        controls.add(StageCheckpoint, self.stage_checkpoint)
        controls.add(CommitWeights, self.commit)
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
        weights, checkpoint = self.weights, Checkpoint.open(Path(call.model_path))
        checkpoint, _ = with_mtp_layers(checkpoint, self._num_layers)
        return self._reply(weights.stage_checkpoint(checkpoint, call.prefix))

    def _reply(self, staged: StagedUpdate) -> Reply:
        self._staged = staged
        count = sum(len(part.parameters) for part in staged.placements)
        return Reply(values={"waiting": list(staged.waiting), "parameters": count})

    def commit(self, call: CommitWeights) -> Reply:
        staged, self._staged = self._staged, None
        if call.write and staged is not None:
            self.weights.commit(staged)
        return Reply()

    def drop_waiting(self, call: DropWaiting) -> Reply:
        self.weights.waiting.clear()
        return Reply()
