"""SGLang's routes for new weights while the server runs: from a directory, from the request, or by a
trainer's broadcast."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated, Literal

from pydantic import Field
from starlette.responses import Response

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.control import (
    CheckWeights,
    JoinGroup,
    LeaveGroup,
    OnEveryRank,
    ReadWeights,
    SetWeightVersion,
    StageBroadcast,
    StageCheckpoint,
    StageTensors,
    UpdateWeights,
)
from mtpserve.server.chat.service import Served, Service
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import Strict

PICKLE = b"\x80"  # how every pickle begins since its second protocol
SHOWN = 3  # names in a message
MOST = 1 << 31  # of a number that is handed on
MOST_TEXT = 4 << 30  # of base64: a message between processes has 4 GiB at most

Version = Annotated[str, Field(min_length=1, max_length=256)]
TensorName = Annotated[str, Field(min_length=1, max_length=512)]
Rows = Annotated[int, Field(ge=1, le=100_000)]
ROWS = 100  # of a tensor that is read, where nothing is said
GroupName = Annotated[str, Field(min_length=1, max_length=256)]


class Updated(Rendered):
    """`waiting`: tensors that are used once the others of the same parameters have come."""

    success: Literal[True]
    message: str
    weight_version: str
    waiting: list[str]
    num_paused_requests: int = 0


class CallDone(Rendered):
    success: Literal[True]
    message: str


class Checked(CallDone):
    payload: dict[str, dict[str, str]]


class NewVersion(CallDone):
    new_version: str


class WeightUpdate(Strict):
    """What all ways of an update have. The prefix cache is emptied after each, whatever `flush_cache` is."""

    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: Version | None = None


class DiskUpdate(WeightUpdate):
    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_format: Literal["auto", "safetensors"] | None = None
    prefix: Annotated[str, Field(max_length=16)] | None = None


class TensorUpdate(WeightUpdate):
    serialized_named_tensors: Annotated[list[str], Field(min_length=1, max_length=4096)]
    load_format: Literal["safetensors"] | None = None


class BroadcastUpdate(WeightUpdate):
    names: Annotated[list[str], Field(min_length=1)]
    dtypes: list[str]
    sizes: Annotated[list[list[Annotated[int, Field(ge=0, le=MOST)]]], Field(alias="shapes")]
    group_name: GroupName = "weight_update_group"


class GroupJoin(Strict):
    master_address: Annotated[str, Field(min_length=1, max_length=256)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=MOST)]
    world_size: Annotated[int, Field(ge=2, le=MOST)]
    group_name: GroupName = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"


class GroupLeave(Strict):
    group_name: GroupName = "weight_update_group"


class WeightsQuery(Strict):
    name: TensorName
    truncate_size: Rows | None = None


class WeightsCheck(Strict):
    action: Literal["snapshot", "compare", "checksum"] | None = None


class VersionChange(Strict):
    new_version: Version
    abort_all_requests: bool | None = None


async def update_weights_from_disk(service: Served, body: DiskUpdate) -> Response:
    """Load a checkpoint's weights in place of those that are served. Its tensors are checked before any is
    written; names that it has not are left as they are."""
    return await updated(service, body, StageCheckpoint(body.model_path, body.prefix or ""))


async def update_weights_from_tensor(service: Served, body: TensorUpdate) -> Response:
    """Take weights from the request: base64 of safetensors files, with a checkpoint's names. Parts of one
    parameter may come in several requests."""
    data = await asyncio.to_thread(decoded, body.serialized_named_tensors)
    return await updated(service, body, StageTensors(data))


async def update_weights_from_distributed(service: Served, body: BroadcastUpdate) -> Response:
    """Receive weights that a trainer broadcasts, in the order of their names."""
    return await updated(service, body, StageBroadcast(body.names, body.dtypes, body.sizes, body.group_name))


async def init_weights_update_group(service: Served, body: GroupJoin) -> Response:
    """Join a trainer's group of torch.distributed, with every rank of every engine. Returns when all members
    have joined."""
    service.check_alive()
    await service.client.control(OnEveryRank(JoinGroup(**body.model_dump())))
    return JSON(CallDone(True, f"joined the group {body.group_name}"))


async def destroy_weights_update_group(service: Served, body: GroupLeave) -> Response:
    """Leave a trainer's group."""
    service.check_alive()
    await service.client.control(OnEveryRank(LeaveGroup(body.group_name)))
    return JSON(CallDone(True, f"left the group {body.group_name}"))


async def update_weight_version(service: Served, body: VersionChange) -> Response:
    """Change the name of the weights' version, which answers have. The weights stay."""
    service.check_alive()
    if body.abort_all_requests:
        service.abort(None)
    await service.client.control(SetWeightVersion(body.new_version))
    return JSON(NewVersion(True, f"the weights' version is {body.new_version}", body.new_version))


async def get_weights_by_name(service: Served, name: TensorName, truncate_size: Rows = ROWS) -> Response:
    """Read the first rows of a tensor, by its name in a checkpoint."""
    return await weights_of(service, WeightsQuery(name=name, truncate_size=truncate_size))


async def post_get_weights_by_name(service: Served, body: WeightsQuery) -> Response:
    """Read the first rows of the tensor that the body names."""
    return await weights_of(service, body)


async def weights_of(service: Service, body: WeightsQuery) -> Response:
    service.check_alive()
    rows = ROWS if body.truncate_size is None else body.truncate_size
    reply = await service.client.control(OnEveryRank(ReadWeights(body.name, rows)))
    return JSON(reply.values["parameter"])


async def weights_checker(service: Served, body: WeightsCheck) -> Response:
    """Remember the checksums of all weights, compare the weights with them, or list them. 400 where they
    differ."""
    service.check_alive()
    action = body.action or "checksum"
    reply = await service.client.control(OnEveryRank(CheckWeights(action)))
    return JSON(Checked(True, f"{action}: done", {"checksums": reply.values["checksums"]}))


async def updated(
    service: Service, body: WeightUpdate, stage: StageCheckpoint | StageTensors | StageBroadcast
) -> Response:
    service.check_alive()
    if body.abort_all_requests:
        service.abort(None)
    reply = await service.client.update_weights(UpdateWeights(stage, body.weight_version))
    waiting, number = reply.values["waiting"], reply.values["parameters"]
    message = f"parameters updated: {number}"
    if waiting:
        names = ", ".join(waiting[:SHOWN]) + (" …" if len(waiting) > SHOWN else "")
        message += f"; tensors that wait for others of the same parameter: {len(waiting)} ({names})"
    return JSON(Updated(True, message, service.weight_version, waiting))


def decoded(texts: list[str]) -> list[bytes]:
    """Raises InvalidRequest for what is not base64, for a pickle, and for more than processes can say at
    once."""
    if sum(map(len, texts)) > MOST_TEXT:
        raise InvalidRequest("serialized_named_tensors has more than 3 GiB", "serialized_named_tensors")
    data = []
    for number, text in enumerate(texts):
        where = f"serialized_named_tensors[{number}]"
        try:
            data.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"{where} is not base64: {error}", "serialized_named_tensors") from error
        if data[-1].startswith(PICKLE):
            raise InvalidRequest(
                f"{where} is a pickle, which could run code: send base64 of what "
                "safetensors.torch.save(dict(named_tensors)) returns",
                "serialized_named_tensors",
            )
    return data
