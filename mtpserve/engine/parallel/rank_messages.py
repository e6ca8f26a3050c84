"""What rank 0, the engine's process, and the other processes that compute the same model say to each other,
as msgpack over pipes.

    rank 0   StartRank          Room                      LaunchStep, Read, FinishTick, Reshape …
    others              Room          Reached … Reached   Moved, after a Read        Failed at any time

The end of the pipe ends the others.

Whatever rank 0's runner is asked to do the others do in the same order. They choose tokens for themselves,
from the same numbers: a plan is all that they need.
"""

from __future__ import annotations

import os
from typing import Generic, Literal, NamedTuple, TypeVar
from zlib import crc32

import msgspec

from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError, EngineDead, LoadError, MTPServeError
from mtpserve.core.plan import StepPlan, StepResult, Transferred
from mtpserve.core.profile import ProfileChange
from mtpserve.core.protocols.control import Calls, Reply
from mtpserve.core.sampling import GrammarSpec
from mtpserve.core.spec_sizes import SpecShape

T = TypeVar("T")


class SharedFiles(NamedTuple):
    """Descriptors of memory that the ranks share; None: there is none."""

    sums: int | None = None  # mtpserve_kernels/cpu/ranks
    pages: int | None = None  # runtime/remote/shared_memory


class RankMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all: an array whose first element is the class's name."""


class StartRank(RankMessage, frozen=True):
    config: EngineConfig  # its `rank` is the process's
    log_level: int
    log_format: str


class Room(RankMessage, frozen=True):
    """What a rank has memory for; then from rank 0 the least of it, which all of them use. See
    runtime.memory.MemoryPlan."""

    pages: list[int]
    states: int
    max_running: int
    context_length: int
    port: int = 0  # from rank 0: where torch.distributed meets


class LaunchStep(RankMessage, frozen=True):
    plan: StepPlan


class Read(RankMessage, frozen=True):
    """The result of the oldest step that was not read yet."""

    digest: int  # rank 0's digest


class FinishTick(RankMessage, frozen=True):
    """Tells engines that share their experts to go on with rounds until all engines have finished theirs
    (runtime/parallel/rounds)."""


class Reshape(RankMessage, frozen=True):
    shape: SpecShape


class Prepare(RankMessage, frozen=True):
    """A grammar that a request will have."""

    spec: GrammarSpec


class ProfileRank(RankMessage, frozen=True):
    change: ProfileChange


class ControlRank(RankMessage, frozen=True):
    """Answered by RankReply."""

    call: Calls


class RankReply(RankMessage, frozen=True):
    reply: Reply


class Reached(RankMessage, frozen=True):
    stage: Literal["loaded", "ready"]


class Moved(RankMessage, frozen=True):
    """The rank's parts of pages that have been moved since the last one."""

    ended: list[Transferred]


class Failed(RankMessage, frozen=True):
    """The last message of a rank."""

    kind: Literal["config", "load", "engine"]
    message: str

    def error(self, rank: int) -> MTPServeError:
        """Returns the error. One of the configuration or the checkpoint does not name the rank: it speaks for
        itself."""
        if self.kind == "engine":
            return EngineDead(f"rank {rank} of the model failed: {self.message}")
        return {"config": ConfigError, "load": LoadError}[self.kind](self.message)


Order = StartRank | Room | LaunchStep | Read | FinishTick | Reshape | Prepare | ProfileRank | ControlRank
Answer = Room | Reached | Moved | RankReply | Failed
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def digest(result: StepResult) -> int:
    """Returns a checksum of the tokens that a step committed, which are the same in all ranks."""
    return crc32(repr([span.tokens for span in result.spans]).encode())


class Wire(Generic[T]):
    """Messages through two pipes, each after its length (4 bytes, big-endian). `decoder`: of those that
    come."""

    def __init__(self, incoming: int, outgoing: int, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self.incoming, self.outgoing = os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb", buffering=0)
        self.encoder, self.decoder = msgspec.msgpack.Encoder(), decoder

    def send(self, message: Order | Answer) -> None:
        """Raises BrokenPipeError where nobody listens any more."""
        data = self.encoder.encode(message)
        remaining = memoryview(len(data).to_bytes(4, "big") + data)
        while remaining:
            remaining = remaining[self.outgoing.write(remaining) :]

    def receive(self) -> T | None:
        """The next one, when it is there. None: the other end is closed."""
        length = self.incoming.read(4)
        if len(length) < 4:
            return None
        data = self.incoming.read(size := int.from_bytes(length, "big"))
        return self.decoder.decode(data) if len(data) == size else None

    def close(self) -> None:
        """Nothing more is said."""
        self.outgoing.close()
