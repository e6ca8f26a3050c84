"""A process that computes its part of a model as rank 0 says (ranks.py starts it): no scheduler, no requests
but those in the plans.

    python -m mtpserve.engine.startup.rank --orders FD --answers FD [--sums FD] [--pages FD]

It ignores SIGINT and SIGTERM and dies with its parent, as the engine's process does.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from mtpserve.core.errors import EngineDead, MTPServeError
from mtpserve.core.logs import configure
from mtpserve.core.plan import Transferred
from mtpserve.core.protocols.runner import Launched, ModelRunner
from mtpserve.core.sampling import GrammarSpec
from mtpserve.engine.grammars import PreparedGrammars
from mtpserve.engine.parallel.rank_messages import (
    ORDERS,
    ControlRank,
    Failed,
    FinishTick,
    LaunchStep,
    Moved,
    Order,
    Prepare,
    ProfileRank,
    RankReply,
    Reached,
    Read,
    Reshape,
    SharedFiles,
    StartRank,
    Wire,
    digest,
)
from mtpserve.engine.process.process import TRIM_S, begin, die_with_parent, give_back, kind_of, one_line
from mtpserve.engine.process.profiling import Profiling

log = logging.getLogger(__name__)


class Follower:
    """Does what rank 0's runner is asked to do."""

    def __init__(
        self,
        runner: ModelRunner,
        grammars: PreparedGrammars | None,
        finish_tick: Callable[[], None],
        profiling: Profiling,
    ) -> None:
        self.runner, self.grammars, self.finish_tick, self.profiling = (
            runner,
            grammars,
            finish_tick,
            profiling,
        )
        self.launched: deque[Launched] = deque()
        self.compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self.compiling: list[tuple[GrammarSpec, Future[None]]] = []

    def follow(self, order: Order) -> list[Transferred]:
        """Executes an order. Returns the transfers that have ended."""
        match order:
            case LaunchStep(plan):
                self.wait_for([new_request.request.sampling.grammar for new_request in plan.new_requests])
                with self.profiling.step():
                    self.launched.append(self.runner.launch(plan))
            case Read(expected):
                result = self.launched.popleft().result()
                if digest(result) != expected:
                    raise EngineDead("it has chosen other tokens than rank 0")
                return result.transferred
            case FinishTick():
                self.finish_tick()
            case Reshape(shape):
                self.runner.reshape(shape)
            case ProfileRank(change):
                self.profiling.take(change)
            case Prepare(spec):
                assert self.grammars is not None
                self.compiling.append((spec, self.compiler.submit(self.grammars.prepare, spec)))
        return []

    def wait_for(self, specs: list[GrammarSpec | None]) -> None:
        """Rank 0 has compiled them already."""
        for _, compiling in (entry for entry in self.compiling if entry[0] in specs):
            compiling.exception()
        self.compiling = [entry for entry in self.compiling if not entry[1].done()]


def compute(wire: Wire[Order], files: SharedFiles) -> None:
    """Computes until rank 0 says no more."""
    start = wire.receive()
    if start is None:
        return
    assert isinstance(start, StartRank)
    # What rank 0 says of the model all ranks would say; what ends this one is reported, and rank 0 tells the
    # user.
    level = "debug" if start.log_level <= logging.DEBUG else "critical"
    name = f"engine {start.config.replica} rank {start.config.rank}"
    several = start.config.parallel.data_parallel_size > 1
    prefix = f"{name}: " if several else f"rank {start.config.rank}: "
    configure(level, start.log_format, process=name, prefix=prefix)
    from mtpserve.engine.startup.build import build_rank

    parts = build_rank(start.config, wire, files)
    if parts is None:
        return
    runner, grammars, finish_tick, controls = parts
    follower = Follower(runner, grammars, finish_tick, Profiling(start.config.replica, start.config.rank))
    trimmed = perf_counter()
    gc.collect()
    gc.freeze()
    wire.send(Reached("ready"))
    while (order := wire.receive()) is not None:
        if isinstance(order, ControlRank):
            wire.send(RankReply(controls.take(order.call)))
        elif ended := follower.follow(order):
            wire.send(Moved(ended))
        if perf_counter() - trimmed > TRIM_S:
            give_back()
            trimmed = perf_counter()


def run(wire: Wire[Order], files: SharedFiles) -> int:
    """Returns the exit code."""
    from mtpserve_kernels.cpu.ranks import PeerGone

    try:
        compute(wire, files)
    except PeerGone:
        while wire.receive() is not None:  # rank 0 knows who has ended, and ends this one
            pass
    except BrokenPipeError:
        pass
    except MTPServeError as error:
        wire.send(Failed(kind_of(error), one_line(error)))
        return 1
    except Exception as error:
        log.critical("fails", exc_info=True)
        wire.send(Failed("engine", f"{type(error).__name__}: {one_line(error)}"))
        return 1
    return 0


def main() -> int:
    begin()
    parser = argparse.ArgumentParser(prog="mtpserve.engine.startup.rank")
    for name in ("orders", "answers", *SharedFiles._fields):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()
    die_with_parent()
    return run(Wire(args.orders, args.answers, ORDERS), SharedFiles(args.sums, args.pages))


if __name__ == "__main__":
    sys.exit(main())
