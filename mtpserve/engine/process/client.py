"""The engine process as the front end sees it: starts it, submits, streams, notices that it died or hangs,
ends it.

Implements `core.clients.EngineClient`. One object per engine process; all methods belong to one event loop.
It holds no text and no HTTP: tokens in, tokens out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from msgspec import structs

from mtpserve.config import EngineConfig
from mtpserve.core.errors import EngineDead, MTPServeError, QueueFull, RequestFailed, ShuttingDown, quantity
from mtpserve.core.heartbeat import Heartbeat
from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.core.protocols.control import Calls, Reply
from mtpserve.core.request import ModelCard, Request, TokenEvent
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport
from mtpserve.engine.process.hang import dump_stacks, silence
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
from mtpserve.engine.process.process import DEFAULT_FACTORY

log = logging.getLogger(__name__)
A = TypeVar("A")

MAX_UNREAD = 4096  # events that wait for a reader before its request is aborted
MAX_AT_ONCE = 32  # events at once, for a reader that is late
SILENT_S = 600.0  # how long the process may write a trace
LAST_WORDS_S = 0.2  # how long after the process's end its last message may still arrive
KILLED_S = 10.0  # seconds in which a killed process ends, unless a driver holds it


def private_directory() -> str:
    """Makes a directory for the two sockets, with mode 0700. Raises MTPServeError if it cannot."""
    try:
        directory = tempfile.mkdtemp(prefix="mtpserve-")
    except OSError as error:
        raise MTPServeError(
            f"cannot create a directory for the engine's sockets: {error}; set TMPDIR to another directory"
        ) from error
    longest = max(len(os.fsencode(f"{directory}/{name}")) for name in (INBOX, OUTBOX))
    if longest > zmq.IPC_PATH_MAX_LEN:
        os.rmdir(directory)
        raise MTPServeError(f"TMPDIR is too long for the path of a socket: {directory}")
    return directory


# glibc's malloc asks for huge pages then: a step of one request, which reads every weight once, takes 4 to 6
# % less on two cores of Zen 5.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def wait_policy() -> dict[str, str]:
    """How OpenMP's threads wait for the next product, as environment variables: they spin for a millisecond
    or two, which is longer than a step is busy elsewhere, and then sleep, so that an idle engine leaves its
    cores to others. Sleeping at once takes up to twice the time per step, spinning for ever takes the front
    end's core (benchmarks/README.md)."""
    return {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "100000", "KMP_BLOCKTIME": "2"}


def environment() -> dict[str, str]:
    """The engine's process has it. What the user has set stays."""
    return HUGE_PAGES | wait_policy() | os.environ


class Mailbox:
    """What waits for the reader of one stream: events, or the error that ends it."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.weight_version = ""  # of the last event with tokens
        self._error: MTPServeError | None = None
        self._coming: asyncio.Future[None] | None = None  # while the reader waits

    def put(self, event: TokenEvent) -> None:
        self.events.append(event)
        self._wake()

    def end(self, error: MTPServeError) -> None:
        """What was not read yet is dropped: the client is not waiting for it, or does not read."""
        self.events, self._error = [], error
        self._wake()

    async def take(self) -> list[TokenEvent]:
        """What is there, once something is, but no more than a reader gets through without holding up the
        others."""
        while not self.events:
            if self._error is not None:
                raise self._error
            self._coming = asyncio.get_running_loop().create_future()
            await self._coming
        events, self.events = self.events[:MAX_AT_ONCE], self.events[MAX_AT_ONCE:]
        return events

    def _wake(self) -> None:
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(None)


class ProcessClient:
    """`card` exists after `start()`. Streams end with EngineDead once the process is gone; the client does
    not restart it. `submitted` is called when the process was sent a request."""

    card: ModelCard
    hung = False  # that is why it was ended

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        progress: bool = False,
        log_level: str = "info",
        log_format: str = "text",
    ) -> None:
        self.submitted: Callable[[], None] = lambda: None
        self._start_message = Start(config, progress, log_level, log_format)
        self._factory = factory
        self._directory = private_directory()
        self._pulse, self._timeout = Heartbeat(), config.parallel.engine_timeout
        self._pulse.share(Path(self._directory) / PULSE_FILE)
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PULL)
        # an ordinary one: sending never waits
        self._requests: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        self._requests.setsockopt(zmq.SNDHWM, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
        self._open: dict[str, Mailbox] = {}
        self._ready: asyncio.Future[ModelCard] = asyncio.get_running_loop().create_future()
        # may end unawaited
        self._ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stats = EngineStats()
        # answers that are still to come; cancelled where nobody waits
        self._spec_reports: deque[asyncio.Future[SpecReport]] = deque()
        self._excused = 0.0  # until then silence means nothing; monotonic's
        self._profile_reports: deque[asyncio.Future[ProfileReport]] = deque()  # the same
        self._replies: deque[asyncio.Future[Reply]] = deque()  # the same
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the engine is ready. Raises ConfigError, LoadError or EngineDead, with the engine's
        own line."""
        self._events.bind(endpoint(self._directory, OUTBOX))
        self._requests.connect(endpoint(self._directory, INBOX))
        command = [
            sys.executable,
            "-m",
            "mtpserve.engine.process.process",
            "--endpoint-dir",
            self._directory,
            "--factory",
            self._factory,
        ]
        # Standard input is never written: it tells the child when this process ends, however it ends.
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, env=environment())
        self._send(self._start_message)
        listener = asyncio.create_task(self._listen())
        self._tasks = [listener, asyncio.create_task(self._watch(self._process, listener))]
        self.card = await self._ready
        if self._timeout > 0:
            self._tasks.append(asyncio.create_task(self._watch_pulse(self._process)))

    async def stop(self, grace: float = 2.0) -> None:
        """Ends the process, by force after `grace` seconds, and every stream that is still open. Leaves no
        child; may be repeated."""
        self._die("the server is shutting down", ShuttingDown)
        process = self._process
        if process is not None and process.returncode is None:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), grace)
            except TimeoutError:
                await self._kill(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._requests.close(linger=0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _kill(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            await asyncio.wait_for(process.wait(), KILLED_S)
        except TimeoutError:
            log.error("cannot kill the engine process %d: the system or a driver blocks it", process.pid)

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._death)

    @property
    def dead(self) -> str | None:
        return self._death.result() if self._death.done() else None

    # -- requests --------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncGenerator[list[TokenEvent], None]:
        if self.dead is not None:
            raise EngineDead(self.dead)
        # The engine would say the same, but only between two steps.
        if (
            self.card.capacity is not None
            and len(self._open) >= self.card.capacity
            and not request.is_migrated
        ):
            raise QueueFull(
                f"{quantity(len(self._open), 'request')} running or waiting, and "
                "--max-queued-requests allows no more"
            )
        mailbox = self._open[request.id] = Mailbox()
        self._send(Submit(request))
        self.submitted()
        try:
            while True:
                events = await mailbox.take()
                yield events
                if events[-1].finish is not None:
                    return
        finally:
            self.abort(request.id)

    def join(self, number: int) -> None:
        """See engine/parallel/ticks.py."""
        self._send(Join(number))

    def abort(self, request_id: str) -> None:
        """Ends the request in the engine. Ids that are not running are ignored."""
        if request_id in self._open:
            self._send(Abort(request_id))
            self._end(request_id, RequestFailed("the request was aborted"))

    def reset_prefix_cache(self) -> None:
        """Requests that are submitted from now on find nothing that was computed before."""
        self._send(ResetCache())

    async def set_spec(self, change: SpecChange) -> SpecReport:
        """Changes what depths may be chosen, where they are not fixed. The engine answers between two steps.
        Raises EngineDead."""
        return await self._ask(SetSpec(change), self._spec_reports)

    async def profile(self, change: ProfileChange) -> ProfileReport:
        """Begins or ends a trace of what the engine computes, between two steps. Raises EngineDead."""
        return await self._ask(Profile(change), self._profile_reports)

    async def control(self, call: Calls) -> Reply:
        """Has the engine and its ranks do what the call says, between two steps, with none in flight. The
        reply says whether it was done. Raises EngineDead."""
        return await self._ask(Control(call), self._replies)

    def stats(self) -> EngineStats:
        return self._stats

    # -- inside ----------------------------------------------------------------------------------------------

    async def _ask(self, message: Down, answers: deque[asyncio.Future[A]]) -> A:
        if self.dead is not None:
            raise EngineDead(self.dead)
        self._send(message)
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    def _send(self, message: Down) -> None:
        if not self._requests.closed:
            self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _listen(self) -> None:
        try:
            while True:
                self._receive(self._decoder.decode(await self._events.recv()))
        except msgspec.MsgspecError as error:
            self._die(f"the engine process sent what is no message: {error}")

    def _signs(self) -> int:
        """Changes while the process gets on, and while it has announced that it cannot."""
        return self._pulse.count if monotonic() > self._excused else monotonic_ns()

    def _receive(self, message: Up) -> None:
        self._excused = monotonic() + SILENT_S if isinstance(message, Silent) else 0.0
        match message:
            case Events(events, stats):
                self._stats = stats
                for event in events:
                    self._deliver(event)
            case Spec(report):
                if not (future := self._spec_reports.popleft()).done():
                    future.set_result(report)
            case Profiled(profile):
                if not (profile_future := self._profile_reports.popleft()).done():
                    profile_future.set_result(profile)
            case Controlled(reply):
                if not (reply_future := self._replies.popleft()).done():
                    reply_future.set_result(reply)
            case Rejected(id):
                self._end(id, message.error())
            case Started():
                # both sockets are connected, and no other may be
                shutil.rmtree(self._directory, ignore_errors=True)
            case Ready(card):
                if not self._ready.done():
                    self._ready.set_result(card)
            case Fatal():
                if not self._ready.done():
                    self._ready.set_exception(message.error())
                self._die(message.message)

    def _deliver(self, event: TokenEvent) -> None:
        mailbox = self._open.get(event.id)
        if mailbox is None:  # aborted meanwhile
            return
        if len(mailbox.events) >= MAX_UNREAD:
            log.warning(
                "request %s aborted: its client left %d events unread",
                event.id,
                MAX_UNREAD,
                extra={"request_id": event.id},
            )
            self._send(Abort(event.id))
            self._end(event.id, RequestFailed("the client does not read its stream"))
            return
        # An engine's statistics come with its events, and its weights do not change in between.
        if event.tokens and mailbox.weight_version != self._stats.weight_version:
            mailbox.weight_version = self._stats.weight_version
            event = structs.replace(event, weight_version=mailbox.weight_version)
        mailbox.put(event)
        if event.finish is not None:
            self._forget(event.id)

    def _end(self, request_id: str, error: MTPServeError) -> None:
        mailbox = self._open.get(request_id)
        if mailbox is not None:
            mailbox.end(error)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._open[request_id]

    async def _watch(self, process: Process, listener: asyncio.Task[None]) -> None:
        """Waits for the process's end, hears its last words, then declares it dead."""
        code = await process.wait()
        await asyncio.wait([listener], timeout=0 if self._death.done() else LAST_WORDS_S)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._die(f"the engine process {how}")

    async def _watch_pulse(self, process: Process) -> None:
        """Waits until the process gives no sign of life, has it write its stacks, then declares it dead.
        Whoever owns this client ends it."""
        await silence(self._signs, process.pid, self._timeout)
        reason = f"the engine process gave no sign of life for {self._timeout:g} s (--engine-timeout)"
        log.error("%s: the process is killed", reason)
        await dump_stacks(process.pid)
        self.hung = not self._death.done()
        self._die(reason)

    def _die(self, reason: str, kind: type[EngineDead | ShuttingDown] = EngineDead) -> None:
        if self._death.done():
            return
        if not self._ready.done():
            self._ready.set_exception(kind(reason))
        elif kind is EngineDead and self._ready.exception() is None:  # else start() says it
            log.error("%s", reason)
        self._death.set_result(reason)
        open_answers: list[asyncio.Future[Any]] = [
            *self._spec_reports,
            *self._profile_reports,
            *self._replies,
        ]
        for future in open_answers:
            if not future.done():
                future.set_exception(kind(reason))
        for request_id in list(self._open):
            self._end(request_id, kind(reason))
