"""Tensor parallel: the processes that compute one model together, as rank 0 sees them, which is the engine's process.

    engine ─ plan ─→ EveryRank ─┬─→ rank 0's own runner
                                └─→ rank 1 … size - 1: engine/rank.py

One that dies or fails ends the engine: the others would wait for it in the middle of a layer. None outlives rank 0.
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
from threading import Event, Lock, Thread
from typing import Literal, TypeVar

import msgspec
import torch

from mtpserve.config import EngineConfig
from mtpserve.core.draft_sizes import DraftShape, DraftSizes
from mtpserve.core.errors import EngineDead, MTPServeError
from mtpserve.core.parallel import ALONE, Ranks
from mtpserve.core.plan import StepPlan, StepResult
from mtpserve.core.protocols import Launched, ModelRunner
from mtpserve.core.sampling import GrammarSpec
from mtpserve.engine.rank_messages import (
    ANSWERS,
    Answer,
    Failed,
    LaunchStep,
    Order,
    Prepare,
    Reached,
    Read,
    Reshape,
    Room,
    StartRank,
    Wire,
    digest,
)
from mtpserve.runtime.ranks import TorchRanks, meeting_place, shared, shares_memory

log = logging.getLogger(__name__)

A = TypeVar("A", Room, Reached)

LAST_WORDS_S = 2.0  # after a step has failed: how long until it must be known which rank has ended
STUCK_S = 30.0  # how long rank 0 may wait on its device for a rank that has ended, before it ends itself
END_S = 2.0  # for a process to end when it is told to


@dataclass(slots=True)
class Other:
    """Another rank's process."""

    rank: int
    process: Popen[bytes]
    wire: Wire[Answer]
    said: SimpleQueue[Answer | None] = field(default_factory=SimpleQueue)  # None: it has ended

    def how_it_ended(self) -> str:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"rank {self.rank} of the model {how}"


class RankProcesses:
    """Those of ranks 1 … size - 1; none where the size is 1. `ranks` is what the layers need of them, once `connect` was called."""

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.parallel.tensor_parallel_size
        self.ranks: Ranks = ALONE
        self.failure: MTPServeError | None = None  # of the first one that has ended
        self._memory = os.memfd_create("mtpserve-ranks") if self.size > 1 and hasattr(os, "memfd_create") else -1
        self._sending, self._ending, self._ended, self._noticed = Lock(), Lock(), Event(), Event()
        self._inside = self._closing = False
        self._give_up: Callable[[], None] = lambda: None
        self._others: list[Other] = []
        for rank in range(1, self.size):
            self._others.append(start(rank, self._memory))
            self._tell([self._others[-1]], StartRank(replace(config, rank=rank), log.getEffectiveLevel()))
            Thread(target=self._listen, args=(self._others[-1],), name=f"rank {rank}", daemon=True).start()

    # -- at start -------------------------------------------------------------------------------------------------------------

    def agree(self, room: Room) -> Room:
        """What all ranks have memory for."""
        rooms = [room, *self._each(Room)]
        return Room(
            [min(pages) for pages in zip(*(each.pages for each in rooms), strict=True)],
            min(each.states for each in rooms),
            min(each.max_running for each in rooms),
            min(each.context_length for each in rooms),
        )

    def connect(self, room: Room, device: torch.device) -> str:
        """After `agree`. Who computes, in words that follow others; nothing for one rank."""
        if self.size == 1:
            return ""
        if self._memory >= 0 and shares_memory(device):
            exchange = shared(self._memory, 0, self.size)
            self.ranks, self._give_up, how = exchange, exchange.give_up, "shared memory"
            self.tell(room)
        else:
            store = meeting_place(self.size)
            self.tell(msgspec.structs.replace(room, port=store.port))
            made = TorchRanks(0, self.size, device, store.port, store)
            self.ranks, how = made, made.backend
        return f", {self.size} ranks by {how}"

    def reach(self, stage: Literal["loaded", "ready"]) -> None:
        """Wait until all have come so far."""
        assert all(answer.stage == stage for answer in self._each(Reached))

    def _each(self, kind: type[A]) -> list[A]:
        answers = list[A]()
        for other in self._others:
            answer = other.said.get()
            if not isinstance(answer, kind):
                raise self.death()
            answers.append(answer)
        return answers

    # -- later ----------------------------------------------------------------------------------------------------------------

    def tell(self, order: Order) -> None:
        """All of them. In any thread. Raises EngineDead."""
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

    def check(self) -> None:
        """Raises what the first rank that has ended left behind."""
        if self.failure is not None:
            raise self.death()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do. Where it fails they are not at the same place any more, whoever is to blame: raises EngineDead."""
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
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _listen(self, other: Other) -> None:
        """In a thread of its own, as long as the process lives."""
        failed = None
        while (answer := other.wire.receive()) is not None:
            if isinstance(answer, Failed):
                failed = answer.error(other.rank)
                break
            other.said.put(answer)
        failed = failed or EngineDead(other.how_it_ended())
        with self._ending:
            first, self.failure = self.failure is None and not self._closing, self.failure or failed
        self._ended.set()
        other.said.put(None)
        self._give_up()
        if first and self._inside and not self._noticed.wait(STUCK_S) and self._inside:
            log.critical("%s", failed)
            os._exit(1)  # the device waits for ever, and nothing can stop it


def joined(config: EngineConfig, device: torch.device, memory: int, port: int) -> Ranks:
    """In the process of rank 1 and up, what `connect` makes in rank 0's."""
    size = config.parallel.tensor_parallel_size
    return TorchRanks(config.rank, size, device, port) if port else shared(memory, config.rank, size)


def start(rank: int, memory: int) -> Other:
    """`memory`: a descriptor of what ranks may share, or -1."""
    orders, to_rank = os.pipe()
    from_rank, answers = os.pipe()
    command = [sys.executable, "-m", "mtpserve.engine.rank", "--orders", str(orders), "--answers", str(answers), "--memory", str(memory)]
    passed = [orders, answers, *([memory] if memory >= 0 else [])]
    try:
        # Standard input is never written: it tells the child when this process ends, however it ends.
        process = Popen(command, stdin=PIPE, pass_fds=passed)
    finally:
        os.close(orders)
        os.close(answers)
    return Other(rank, process, Wire(from_rank, to_rank, ANSWERS))


class EveryRank:
    """core.protocols.ModelRunner: has all ranks do what rank 0's runner does."""

    def __init__(self, runner: ModelRunner, others: RankProcesses) -> None:
        self.runner, self.others = runner, others

    @property
    def sizes(self) -> DraftSizes:
        return self.runner.sizes

    @property
    def processors(self) -> bool:
        return self.runner.processors

    def reshape(self, shape: DraftShape) -> None:
        self.runner.reshape(shape)
        self.others.tell(Reshape(shape))

    def launch(self, plan: StepPlan) -> Launched:
        with self.others.together():
            self.others.tell(LaunchStep(plan))
            return StepOfEach(self.runner.launch(plan), self.others)

    def check(self) -> None:
        self.others.check()

    def close(self) -> None:
        self.others.close()


class StepOfEach:
    """core.protocols.Launched."""

    def __init__(self, launched: Launched, others: RankProcesses) -> None:
        self.launched, self.others = launched, others

    def result(self) -> StepResult:
        with self.others.together():
            result = self.launched.result()
            self.others.tell(Read(digest(result)))
            return result
