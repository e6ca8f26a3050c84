"""What operators have an engine do between two steps, with none in flight: a call, which every engine and
each of its ranks takes, and its reply."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mtpserve.core.errors import InvalidRequest, MTPServeError, RequestFailed
from mtpserve.core.protocols.adapters import LoRARequest


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all: an array whose first element is the class's name. Who does what with which is registered
    with the process's Controls (engine/process/controls.py)."""


class SetWeightVersion(Call, frozen=True):
    weight_version: str


class StageTensors(Call, frozen=True):
    """Checks new weights, and writes nothing."""

    data: list[bytes]  # safetensors files, with a checkpoint's names


class StageCheckpoint(Call, frozen=True):
    """The same for a directory's."""

    model_path: str
    prefix: str = ""  # of all its names


class StageBroadcast(Call, frozen=True):
    """The same for tensors that rank 0 of a group broadcasts."""

    names: list[str]
    dtypes: list[str]  # torch's names
    shapes: list[list[int]]
    group_name: str


class JoinGroup(Call, frozen=True):
    """Every rank of every engine joins a trainer's group of torch.distributed. `rank_offset`: the first one's
    number in it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class LeaveGroup(Call, frozen=True):
    group_name: str


class CommitWeights(Call, frozen=True):
    """Writes what was staged, or drops it."""

    write: bool


class UpdateWeights(Call, frozen=True):
    """The engine's: all ranks stage, and write once all have. The reply's values are `waiting`, the names of
    tensors that wait for others of the same parameter, and `parameters`, how many were written."""

    stage: StageTensors | StageCheckpoint | StageBroadcast
    weight_version: str | None = None  # None: it stays


class UpdateTensors(Call, frozen=True):
    """The same in one process. It is never sent."""

    tensors: dict[str, Any]  # torch's, by a checkpoint's names
    weight_version: str | None = None


class DropWaiting(Call, frozen=True):
    """Tensors that wait for others are forgotten."""


class LoadLoRA(Call, frozen=True):
    """Reads an adapter into host memory. A rank's reply has the `fingerprint` of its numbers."""

    request: LoRARequest


class UnloadLoRA(Call, frozen=True):
    """No new request has the adapter. Those that live go on with it."""

    lora_int_id: int


class DropLoRA(Call, frozen=True):
    """An engine tells its ranks that no request has the adapter."""

    lora_int_id: int


MEMORY_TAGS = ("weights", "kv_cache")


class ReleaseMemory(Call, frozen=True):
    """A rank's part of Sleep. The reply's `bytes`: how many were given back."""

    tags: list[str]
    drops_weights: bool


class ResumeMemory(Call, frozen=True):
    tags: list[str]


class Sleep(Call, frozen=True):
    """Memory goes back to the system until WakeUp, and all requests wait. Weights move to host memory, or
    their contents are dropped."""

    tags: list[str]  # of MEMORY_TAGS
    drops_weights: bool = False


class WakeUp(Call, frozen=True):
    tags: list[str] | None = None  # None: all


PauseMode = Literal["abort", "retract", "in_place"]


class PauseGeneration(Call, frozen=True):
    """Nothing is computed until ContinueGeneration, and new requests wait. in_place: who runs keeps its
    pages; otherwise it gives them back and is computed anew later. Requests are aborted by the front end."""

    mode: PauseMode


class ContinueGeneration(Call, frozen=True):
    pass


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`error` is "" where the call was done. Otherwise nothing was done; "invalid": the caller's fault, in
    the field `param`."""

    error: str = ""
    kind: Literal["invalid", "failed"] = "invalid"
    param: str | None = None
    values: dict[str, Any] = {}  # numbers, texts and lists of them, by name

    def check(self) -> Reply:
        """Raises InvalidRequest or RequestFailed for a call that was not done."""
        if not self.error:
            return self
        error: MTPServeError = (
            InvalidRequest(self.error, self.param) if self.kind == "invalid" else RequestFailed(self.error)
        )
        raise error


class ReadWeights(Call, frozen=True):
    """The first rows of a tensor as a checkpoint has it: the reply's value `parameter`."""

    name: str
    rows: int


class CheckWeights(Call, frozen=True):
    """Remember the weights' checksums, compare them with those, or say them: the value `checksums`."""

    action: Literal["snapshot", "compare", "checksum"]


RankCalls = (
    StageTensors
    | StageCheckpoint
    | StageBroadcast
    | CommitWeights
    | DropWaiting
    | JoinGroup
    | LeaveGroup
    | LoadLoRA
    | DropLoRA
    | ReadWeights
    | CheckWeights
    | ReleaseMemory
    | ResumeMemory
)


class OnEveryRank(Call, frozen=True):
    """The engine's: all its ranks take the call."""

    call: RankCalls


# for the decoders of messages
EngineCalls = (
    SetWeightVersion | UpdateWeights | UnloadLoRA | PauseGeneration | ContinueGeneration | Sleep | WakeUp
)
Calls = RankCalls | EngineCalls | OnEveryRank
