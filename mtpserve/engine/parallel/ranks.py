"""Tensor parallel: the processes that compute one model together, as rank 0 sees them, which is the engine's
process.

    engine ─ plan ─→ EveryRank ─┬─→ rank 0's own runner
                                └─→ rank 1 … size - 1: engine/startup/rank.py

One that dies or fails ends the engine: the others would wait for it in the middle of a layer. None outlives
rank 0.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Condition, Event, Lock, Thread
from typing import Literal, TypeVar

import torch
from msgspec import structs

from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError, EngineDead, MTPServeError
from mtpserve.core.logs import current_format
from mtpserve.core.plan import StepPlan, StepResult, Transferred
from mtpserve.core.protocols.control import Calls, Reply
from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.core.protocols.runner import Launched, ModelRunner
from mtpserve.core.sampling import GrammarSpec
from mtpserve.core.spec_sizes import SpecShape, SpecSizes
from mtpserve.engine.parallel.rank_messages import (
    ANSWERS,
    Answer,
    ControlRank,
    Failed,
    LaunchStep,
    Moved,
    Order,
    Prepare,
    RankReply,
    Reached,
    Read,
    Reshape,
    Room,
    SharedFiles,
    StartRank,
    Wire,
    digest,
)
from mtpserve.runtime.paging import PATIENCE_S
from mtpserve.runtime.parallel.ranks import TorchRanks, meeting_place, shared, shares_memory
from mtpserve.runtime.remote.shared_memory import make_file

log = logging.getLogger(__name__)

A = TypeVar("A", Room, Reached, RankReply)

LAST_WORDS_S = 2.0  # after a step has failed: how long until it must be known which rank has ended
STUCK_S = 30.0  # how long rank 0 may wait on its device for a rank that has ended, before it ends itself
END_S = 2.0  # for a process to end when it is told to


@dataclass(slots=True)
class Other:
    """Another rank's process."""

    rank: int
    process: Popen[bytes]
    wire: Wire[Answer]
    answers: SimpleQueue[Answer | None] = field(default_factory=SimpleQueue)  # None: it has ended

    def how_it_ended(self) -> str:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"rank {self.rank} of the model {how}"


class RankProcesses:
    """The processes of ranks 1 … size - 1; none if the size is 1. `ranks` is what the layers need of them,
    once `connect` was called."""

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.parallel.ranks
        self.ranks: Ranks = ALONE
        self.failure: MTPServeError | None = None  # the failure of the first process that has ended
        self.files, self.transfers = shared_files(config), TransfersOfEach(self.size)
        self._sending, self._ending, self._ended, self._noticed = Lock(), Lock(), Event(), Event()
        self._inside = self._closing = False
        self._give_up: Callable[[], None] = lambda: None
        self._others: list[Other] = []
        for rank in range(1, self.size):
            self._others.append(start(rank, self.files))
            message = StartRank(replace(config, rank=rank), log.getEffectiveLevel(), current_format())
            self._tell([self._others[-1]], message)
            Thread(target=self._listen, args=(self._others[-1],), name=f"rank {rank}", daemon=True).start()

    # -- at start --------------------------------------------------------------------------------------------

    def agree(self, room: Room) -> Room:
        """What all ranks have memory for."""
        rooms = [room, *self._receive_all(Room)]
        return Room(
            [min(pages) for pages in zip(*(rank_room.pages for rank_room in rooms), strict=True)],
            min(rank_room.states for rank_room in rooms),
            min(rank_room.max_running for rank_room in rooms),
            min(rank_room.context_length for rank_room in rooms),
        )

    def connect(self, room: Room, device: torch.device) -> str:
        """Connects the ranks, after `agree`. Returns who computes, in words that follow others; nothing for
        one rank."""
        if self.size == 1:
            return ""
        if self.files.sums is not None and shares_memory(device):
            exchange = shared(self.files.sums, 0, self.size)
            self.ranks, self._give_up, how = exchange, exchange.give_up, "shared memory"
            self.tell(room)
        else:
            store = meeting_place(self.size)
            self.tell(structs.replace(room, port=store.port))
            torch_ranks = TorchRanks(0, self.size, device, store.port, store)
            self.ranks, how = torch_ranks, torch_ranks.backend
        return f", {self.size} ranks by {how}"

    def reach(self, stage: Literal["loaded", "ready"]) -> None:
        """Wait until all have come so far."""
        assert all(answer.stage == stage for answer in self._receive_all(Reached))

    def _receive_all(self, kind: type[A]) -> list[A]:
        answers = list[A]()
        for other in self._others:
            answer = other.answers.get()
            if not isinstance(answer, kind):
                raise self.death()
            answers.append(answer)
        return answers

    # -- later -----------------------------------------------------------------------------------------------

    def tell(self, order: Order) -> None:
        """Sends an order to all of them, in any thread. Raises EngineDead."""
        self._tell(self._others, order)

    def _tell(self, others: Seq[Other], order: Order) -> None:
        try:
            with self._sending:
                for other in others:
                    other.wire.send(order)
        except (BrokenPipeError, ValueError) as error:  # ValueError: it is closed
            raise self.death() from error

    def prepare(self, spec: GrammarSpec) -> None:
        self.tell(Prepare(spec))

    def control(self, call: Calls, take: Callable[[Calls], Reply]) -> Reply:
        """Has all ranks do what the call says; `take` does it in this one. Returns the first reply of a rank
        that has not done it, or this rank's."""
        with self.together():
            self.tell(ControlRank(call))
            reply = take(call)
            replies = [reply, *(answer.reply for answer in self._receive_all(RankReply))]
        return next((other for other in replies if other.error), reply)

    def check(self) -> None:
        """Raises what the first rank that has ended left behind."""
        if self.failure is not None:
            raise self.death()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do. Where it fails they are not at the same place any more, whoever is to
        blame: raises EngineDead."""
        self.check()
        self._inside = True
        try:
            yield
        except Exception as error:
            raise self.death(error) from error
        finally:
            self._inside = False

    def death(self, error: Exception | None = None) -> MTPServeError:
        """`error`: rank 0's own, which may be due to another's end."""
        self._ended.wait(LAST_WORDS_S)
        self._noticed.set()
        if self.failure is None:
            self.failure = EngineDead(f"rank 0 of the model failed: {type(error).__name__}: {error}")
        return self.failure

    def close(self) -> None:
        """Ends the processes. May be repeated."""
        self._closing = True
        for other in self._others:
            other.wire.close()
        for other in self._others:
            try:
                other.process.wait(END_S)
            except TimeoutExpired:
                other.process.kill()
                other.process.wait()
            if other.process.stdin is not None:
                other.process.stdin.close()
        self._others = []
        if isinstance(self.ranks, TorchRanks):
            self.ranks.close()
        self.ranks = ALONE
        for file in self.files:
            if file is not None:
                os.close(file)
        self.files = SharedFiles()

    def _listen(self, other: Other) -> None:
        """Reads one process's messages in a thread of its own, as long as the process lives."""
        failed = None
        while (answer := other.wire.receive()) is not None:
            if isinstance(answer, Failed):
                failed = answer.error(other.rank)
                break
            if isinstance(answer, Moved):
                self.transfers.add(answer.ended)
            else:
                other.answers.put(answer)
        failed = failed or EngineDead(other.how_it_ended())
        with self._ending:
            first, self.failure = self.failure is None and not self._closing, self.failure or failed
        self._ended.set()
        other.answers.put(None)
        self._give_up()
        if first and self._inside and not self._noticed.wait(STUCK_S) and self._inside:
            log.critical("%s", failed)
            os._exit(1)  # the device waits for ever, and nothing can stop it


def shared_files(config: EngineConfig) -> SharedFiles:
    """Raises ConfigError where pages need what this Python has not."""
    if config.parallel.ranks == 1:
        return SharedFiles()
    if hasattr(os, "memfd_create"):
        return SharedFiles(os.memfd_create("mtpserve-ranks"), make_file() if config.host_bytes else None)
    if config.host_bytes:
        options = "--kv-offload-gib, --kv-offload-dir and --disaggregation-mode"
        raise ConfigError(
            f"{options} need os.memfd_create with --tensor-parallel-size, and this Python has none"
        )
    return SharedFiles()


def joined(config: EngineConfig, device: torch.device, file: int | None, port: int) -> Ranks:
    """Returns in the process of rank 1 and up what `connect` makes in rank 0's. `file`: SharedFiles.sums."""
    size = config.parallel.ranks
    if port:
        return TorchRanks(config.rank, size, device, port)
    assert file is not None
    return shared(file, config.rank, size)


def start(rank: int, files: SharedFiles) -> Other:
    orders, to_rank = os.pipe()
    from_rank, answers = os.pipe()
    passed = {"orders": orders, "answers": answers} | {
        name: file for name, file in files._asdict().items() if file is not None
    }
    command = [
        sys.executable,
        "-m",
        "mtpserve.engine.startup.rank",
        *(word for name, file in passed.items() for word in (f"--{name}", str(file))),
    ]
    try:
        # Standard input is never written: it tells the child when this process ends, however it ends.
        process = Popen(command, stdin=PIPE, pass_fds=tuple(passed.values()))
    finally:
        os.close(orders)
        os.close(answers)
    return Other(rank, process, Wire(from_rank, to_rank, ANSWERS))


class TransfersOfEach:
    """Ends of transfers in all of `size` ranks: each moves its part of a page, and the page is moved when all
    have."""

    def __init__(self, size: int) -> None:
        self._size, self._changed = size, Condition()
        self._parts: dict[int, list[Transferred]] = {}  # by the transfer's number
        self._finished: list[Transferred] = []

    def add(self, ended: Seq[Transferred]) -> None:
        """Adds the transfers that one rank has ended, in any thread."""
        with self._changed:
            for result in ended:
                parts = self._parts.setdefault(result.transfer.number, [])
                parts.append(result)
                if len(parts) == (self._size if result.transfer.of_each_rank else 1):
                    self._finished.append(join_parts(self._parts.pop(result.transfer.number)))
            self._changed.notify_all()

    def merged(self, result: StepResult) -> StepResult:
        """Rank 0's, with the transfers that have ended in all ranks. Without spans nothing else is to be
        done, and it waits for one."""
        if not result.transferred and not self._parts and not self._finished:
            return result
        self.add(result.transferred)
        with self._changed:
            if not result.spans:
                self._changed.wait_for(lambda: self._finished or not self._parts, PATIENCE_S)
            ended, self._finished = self._finished, []
        return structs.replace(result, transferred=ended)


def join_parts(parts: Seq[Transferred]) -> Transferred:
    """Joins all ranks' parts of one transfer."""
    first = parts[0]
    seconds, size = max(result.seconds for result in parts), sum(result.bytes for result in parts)
    return Transferred(first.transfer, all(result.good for result in parts), seconds, size, first.reason)


def plan_of_each(plan: StepPlan) -> StepPlan:
    """Returns the plan for ranks but the first."""
    if not plan.transfers:
        return plan
    return structs.replace(plan, transfers=[transfer for transfer in plan.transfers if transfer.of_each_rank])


class EveryRank:
    """core.protocols.ModelRunner: has all ranks do what rank 0's runner does."""

    def __init__(self, runner: ModelRunner, others: RankProcesses) -> None:
        self.runner, self.others = runner, others

    @property
    def sizes(self) -> SpecSizes:
        return self.runner.sizes

    @property
    def processors(self) -> bool:
        return self.runner.processors

    def reshape(self, shape: SpecShape) -> None:
        self.runner.reshape(shape)
        self.others.tell(Reshape(shape))

    def launch(self, plan: StepPlan) -> Launched:
        with self.others.together():
            self.others.tell(LaunchStep(plan_of_each(plan)))
            return StepOfEach(self.runner.launch(plan), self.others)

    def check(self) -> None:
        self.others.check()

    def close(self) -> None:
        self.others.close()


class StepOfEach:
    """core.protocols.Launched."""

    def __init__(self, launched: Launched, others: RankProcesses) -> None:
        self.launched, self.others, self.ended = launched, others, launched.ended

    def result(self) -> StepResult:
        with self.others.together():
            result = self.launched.result()
            self.others.tell(Read(digest(result)))
            return self.others.transfers.merged(result)
