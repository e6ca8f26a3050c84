"""The engine process: an inbox, the engine's step, an outbox. It is started by `ProcessClient`, not by hand,
and decides nothing.

    python -m mtpserve.engine.process.process --endpoint-dir DIR [--factory module:function]

It ignores SIGINT and SIGTERM, since the front end drains first and says Shutdown, and it dies with its
parent: standard input carries nothing, its end means that the parent is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Literal, Protocol

import msgspec
import zmq

from mtpserve.core.errors import ConfigError, EngineBusy, InvalidRequest, LoadError, MTPServeError
from mtpserve.core.heartbeat import PULSE
from mtpserve.core.logs import configure
from mtpserve.core.request import ModelCard, Request, TokenEvent
from mtpserve.core.sampling import GrammarSpec
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport
from mtpserve.engine.parallel.ticks import State, Ticks
from mtpserve.engine.process.controls import Controls
from mtpserve.engine.process.core_share import CoreShare
from mtpserve.engine.process.messages import (
    INBOX,
    OUTBOX,
    PULSE_FILE,
    Abort,
    Control,
    Controlled,
    Down,
    Events,
    Fatal,
    Join,
    Profile,
    Profiled,
    Ready,
    Rejected,
    ResetCache,
    SetSpec,
    Shutdown,
    Silent,
    Spec,
    Start,
    Started,
    Submit,
    Up,
    endpoint,
)
from mtpserve.engine.process.profiling import Profiling, profiling_of

log = logging.getLogger(__name__)

DEFAULT_FACTORY = "mtpserve.engine.startup.start:build_engine"
LINGER_MS = 2000  # how long the last message may take to leave
PR_SET_PDEATHSIG = 1
# Every new number of rows makes oneDNN and torch's wrapper around it compile products anew and keep them,
# 1024 each: hundreds of megabytes before it levels off. Steady decoding needs two or three dozen. Many more
# do harm under a load that varies: as old ones make room for new ones they leave holes all over the heap.
# Read when torch is imported, which is after `main` has begun.
CPU_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48", "LRU_CACHE_CAPACITY": "48"}
# requests whose grammars are being compiled or wait for it; more are refused as by a full queue
MAX_COMPILING = 64
TRIM_S = 10.0  # how often freed memory is given back to the system
# How often an idle engine says that it lives, looks whether what may change by itself has, and whether all
# that compute are there.
IDLE_MS = 250
POLL_MS = 5  # how often the loop looks for compiled grammars while it has nothing else to do


class EngineLike(Protocol):
    """What the loop needs of an engine; tests bring a fake one."""

    ticks: Ticks
    cores: CoreShare
    controls: Controls

    @property
    def card(self) -> ModelCard: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def changes_idle(self) -> bool: ...
    def compile(self, spec: GrammarSpec | None) -> None: ...
    def add(self, request: Request, compiled: bool = False) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def set_spec(self, change: SpecChange) -> SpecReport: ...
    def step(self) -> list[TokenEvent]: ...
    def settle(self) -> list[TokenEvent]: ...
    def check_integrity(self) -> None: ...
    def check_alive(self) -> None: ...


Factory = Callable[..., EngineLike]  # (config: EngineConfig, *, progress: bool)


class Pipe:
    """The two sockets. Receiving is typed: a message that does not decode is a bug and ends the process."""

    def __init__(self, directory: str) -> None:
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.setsockopt(zmq.RCVHWM, 0)  # bounded by the front end's connections
        self.inbox.bind(endpoint(directory, INBOX))
        self.outbox = self.context.socket(zmq.PUSH)
        self.outbox.connect(endpoint(directory, OUTBOX))
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)

    def send(self, message: Up) -> None:
        self.outbox.send(self.encoder.encode(message))

    def wait(self) -> Down:
        return self.decoder.decode(self.inbox.recv())

    def pause(self, milliseconds: int = POLL_MS) -> bool:
        """Waits for a message, or so long. → whether there is one."""
        return bool(self.inbox.poll(milliseconds))

    def pending_messages(self) -> Iterator[Down]:
        """The messages that are there already."""
        while True:
            try:
                frame = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self.decoder.decode(frame)

    def close(self) -> None:
        self.context.destroy(linger=LINGER_MS)


class Inbox:
    """What becomes of messages. Grammars are compiled in a thread of their own, one after the other, and no
    step waits for them."""

    def __init__(self, engine: EngineLike, pipe: Pipe, profiling: Profiling) -> None:
        self.engine, self.pipe, self.profiling = engine, pipe, profiling
        self.compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self.compiling: dict[str, tuple[Request, Future[None]]] = {}

    def take(self, message: Down) -> bool:
        """Apply one message. False: shut down."""
        match message:
            case Submit(request) if request.sampling.grammar is None:
                self.add(request)
            case Submit(request) if len(self.compiling) >= MAX_COMPILING:
                self.pipe.send(
                    Rejected(
                        request.id, "busy", f"{MAX_COMPILING} requests wait for their grammars to be compiled"
                    )
                )
            case Submit(request):
                self.compiling[request.id] = (
                    request,
                    self.compiler.submit(self.engine.compile, request.sampling.grammar),
                )
            case Abort(id):
                if id in self.compiling:
                    self.compiling.pop(id)[1].cancel()
                self.engine.abort(id)
            case ResetCache():
                self.engine.reset_prefix_cache()
            case SetSpec(change):
                self.pipe.send(Spec(self.engine.set_spec(change)))
            case Profile(change):
                self.pipe.send(Profiled(self.profiling.take(change)))
            case Control(call):
                self.pipe.send(Events(self.engine.settle(), self.engine.stats))
                self.pipe.send(Silent())
                reply = self.engine.controls.take(call)
                self.pipe.send(Events([], self.engine.stats))  # of what has changed, before the reply
                self.pipe.send(Controlled(reply))
            case Join(number):
                self.engine.ticks.heard = number
            case Shutdown():
                return False
        return True

    @property
    def state(self) -> State:
        if self.engine.has_work:
            return State.WORKS
        return State.WAITS if self.compiling else State.IDLE

    def add_compiled(self) -> None:
        """Requests whose grammars are there now."""
        for id in [id for id, (_, future) in self.compiling.items() if future.done()]:
            self.add(*self.compiling.pop(id))

    def add(self, request: Request, compiled: Future[None] | None = None) -> None:
        try:
            if compiled is not None:
                compiled.result()
            self.engine.add(request, compiled is not None)
        except InvalidRequest as error:
            self.pipe.send(Rejected(request.id, "invalid", str(error), error.param))
        except EngineBusy as error:
            self.pipe.send(Rejected(request.id, "busy", str(error)))


def give_back() -> None:
    """Tensors of ever other sizes leave holes, which glibc keeps unless it is asked. Other libraries have no
    such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def loop(engine: EngineLike, pipe: Pipe, profiling: Profiling) -> None:
    """Step while there is work, block in the socket while there is none, here or in an engine that has a part
    of the experts."""
    inbox, ticks, trimmed, going = Inbox(engine, pipe, profiling), engine.ticks, perf_counter(), True
    while True:
        PULSE.beat()
        engine.cores.update()
        if perf_counter() - trimmed > TRIM_S:
            give_back()
            trimmed = perf_counter()
        if inbox.state == State.IDLE and ticks.sleeps:
            engine.check_integrity()
            pipe.send(Events([], engine.stats))
            while not pipe.pause(IDLE_MS):
                PULSE.beat()
                engine.check_alive()
                if engine.changes_idle:
                    pipe.send(Events([], engine.stats))
            going = inbox.take(pipe.wait())
        elif inbox.state < State.WORKS and ticks.state == State.WAITS:
            pipe.pause()
        going = going and all(inbox.take(message) for message in pipe.pending_messages())
        inbox.add_compiled()
        state = inbox.state if going else State.ENDS
        if state == State.IDLE and ticks.sleeps:
            continue  # it was nothing that concerns the others
        if ticks.begin(state) == State.ENDS:
            return
        if engine.has_work:
            with profiling.step():
                events = engine.step()
            pipe.send(Events(events, engine.stats))
        ticks.finish()


def load_factory(name: str) -> Factory:
    module, _, attribute = name.partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory


def run(pipe: Pipe, factory: str) -> int:
    """Build, serve, and turn whatever goes wrong into one Fatal message. Returns the exit code."""
    try:
        start = pipe.wait()
        if not isinstance(start, Start):
            raise TypeError(f"expected Start, got {type(start).__name__}")
        name, several = f"engine {start.config.replica}", start.config.parallel.data_parallel_size > 1
        # lines of text name an engine where there are several
        configure(start.log_level, start.log_format, process=name, prefix=f"{name}: " if several else "")
        pipe.send(Started())
        engine = load_factory(factory)(start.config, progress=start.progress)
        gc.collect()
        # the model's objects live as long as the process: keep them out of every later collection
        gc.freeze()
        pipe.send(Ready(engine.card))
        loop(engine, pipe, profiling_of(engine, start.config.replica, lambda: pipe.send(Silent())))
    except MTPServeError as error:
        pipe.send(Fatal(kind_of(error), one_line(error)))
        return 1
    except Exception as error:
        log.exception("the engine process stops because of an error")
        pipe.send(Fatal("engine", f"the engine failed: {type(error).__name__}: {one_line(error)}"))
        return 1
    return 0


def kind_of(error: MTPServeError) -> Literal["config", "load", "engine"]:
    if isinstance(error, ConfigError):
        return "config"
    return "load" if isinstance(error, LoadError) else "engine"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000]


def die_with_parent() -> None:
    """The kernel's own means on Linux; elsewhere, and for a parent that died before this line, the end of
    standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)  # a thread cannot end the process in any other way while the main one computes

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def begin() -> None:
    """What processes that compute do first, before torch is imported: its caches are bounded, the parent
    alone says when to end, and SIGUSR1 has the stacks of all threads written to standard error, whatever they
    are doing."""
    assert "torch" not in sys.modules
    for name, size in CPU_CACHES.items():
        os.environ.setdefault(name, size)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)


def main() -> int:
    begin()
    parser = argparse.ArgumentParser(prog="mtpserve.engine.process.process")
    parser.add_argument("--endpoint-dir", required=True)
    parser.add_argument("--factory", default=DEFAULT_FACTORY)
    options = parser.parse_args()
    die_with_parent()
    PULSE.share(Path(options.endpoint_dir) / PULSE_FILE)
    pipe = Pipe(options.endpoint_dir)
    try:
        return run(pipe, options.factory)
    finally:
        pipe.close()


if __name__ == "__main__":
    sys.exit(main())
