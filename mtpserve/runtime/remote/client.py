"""Reads pages from the node that has computed them. What does not arrive whole is not there: the caller
computes it."""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from mtpserve.cache.keys import Key
from mtpserve.core.kv_transfer import PageSource
from mtpserve.runtime.remote.nixl import Nixl
from mtpserve.runtime.remote.shared_memory import Mapped
from mtpserve.runtime.remote.wire import (
    Done,
    Give,
    Hello,
    PageEntry,
    WantPages,
    differing,
    receive,
    receive_into,
    send,
)

log = logging.getLogger(__name__)

CONNECT_S = 5.0
QUIET_S = 10.0  # how long the other node may send nothing of what it has


@dataclass(frozen=True, slots=True)
class WantedPage:
    """A page, and where its bytes go."""

    group: int
    key: Key
    target: np.ndarray  # [bytes] uint8


@dataclass(frozen=True, slots=True)
class Fetched:
    """The reason why each wanted page is not there; "": it is there."""

    missing: list[str]
    seconds: float  # without those in which the pages were still being computed


class PageClient:
    """Reads pages of other nodes, for several threads. `seconds`: how long a request may wait for pages that
    are still being computed. `way`: auto: from the other node's memory where that can be opened, else by TCP;
    shm, tcp: one of these alone. With `nixl`, by that from nodes that have it."""

    def __init__(self, facts: dict[str, str], seconds: float, way: str, nixl: Nixl | None = None) -> None:
        self._facts, self._seconds, self._way, self._nixl = facts, seconds, way, nixl
        self._mapped = Mapped()

    def fetch(self, source: PageSource, targets: Seq[WantedPage]) -> Fetched:
        """Raises nothing: whatever goes wrong is why a page is not there."""
        pull = Pull(targets)
        where = f"pages of {source.host} port {source.port}"
        try:
            with socket.create_connection((source.host, source.port), CONNECT_S) as connection:
                self._talk(connection, source, pull)
        except (OSError, ValueError) as error:
            log.warning("%s: %s: the prompt is computed here", where, error or type(error).__name__)
        bad = sorted({why for why in pull.missing if why})
        if bad:
            log.warning(
                "%s: %d of %d KV pages are missing (%s)",
                where,
                sum(map(bool, pull.missing)),
                len(targets),
                ", ".join(bad),
            )
        return Fetched(pull.missing, perf_counter() - (pull.answered if source.waits else pull.began))

    def _talk(self, connection: socket.socket, source: PageSource, pull: Pull) -> None:
        """Page by page, so that what has arrived when it raises is there."""
        connection.settimeout(QUIET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pull.all_are("broken")
        send(connection, Hello(self._facts))
        hello = receive(connection, Hello)
        if (difference := differing(self._facts, hello.facts)) is not None:
            pull.all_are("differs")
            raise ValueError(f"its pages are not compatible: {difference}")
        take = self._taking(hello, pull)
        pages = [(page.group, page.key) for page in pull.targets]
        send(connection, WantPages(source.lease, source.waits, self._seconds, pages, copies=take is not None))
        connection.settimeout(self._seconds + QUIET_S)
        pull.all_are("timeout")
        give = receive(connection, Give)
        pull.answered = perf_counter()
        connection.settimeout(QUIET_S)
        pull.all_are("absent" if give.has_lease else "timeout" if source.waits else "ended")
        while True:
            if any(not 0 <= page.index < len(pull.targets) for page in give.pages):
                raise ValueError("it sent pages that were not requested")
            for page in give.pages:
                pull.missing[page.index] = "broken"
            (take or partial(pull.receive, connection))(give.pages)
            if not give.more:
                break
            give = receive(connection, Give)
        send(connection, Done(pull.num_pages, pull.bytes, perf_counter() - pull.answered))

    def _taking(self, hello: Hello, pull: Pull) -> Callable[[Seq[PageEntry]], None] | None:
        """Returns the function that takes pages from the other node's memory; None: there is none."""
        if self._nixl is not None and hello.nixl:
            return partial(pull.read, self._nixl, hello)
        memory = (
            None if self._way in ("tcp", "nixl") or hello.memory is None else self._mapped.open(hello.memory)
        )
        if memory is None and self._way == "shm":
            pull.all_are("unreachable")
            raise ValueError(
                "--disaggregation-transfer-backend shm: the shared memory of the prefill node cannot "
                "be opened: it is on another machine"
            )
        return None if memory is None else partial(pull.copy, memory)


class Pull:
    """What becomes of the pages that one request wants."""

    def __init__(self, targets: Seq[WantedPage]) -> None:
        self.targets, self.missing = targets, ["unreachable"] * len(targets)
        self.began = self.answered = perf_counter()
        self.num_pages = self.bytes = 0

    def all_are(self, why: str) -> None:
        self.missing = [why] * len(self.targets)

    def receive(self, connection: socket.socket, pages: Seq[PageEntry]) -> None:
        for page in pages:
            receive_into(connection, self.targets[page.index].target.data)
            self._check(page)

    def copy(self, memory: np.ndarray, pages: Seq[PageEntry]) -> None:
        for page in pages:
            target = self.targets[page.index].target
            np.copyto(target, memory[page.start : page.start + len(target)])
            self._check(page)

    def read(self, nixl: Nixl, other: Hello, pages: Seq[PageEntry]) -> None:
        targets = [(page.start, self.targets[page.index].target) for page in pages]
        places = [(other.base + start, target.ctypes.data, len(target)) for start, target in targets]
        if not nixl.read(other.nixl, places, QUIET_S):
            raise ValueError("NIXL could not read the node's memory")
        for page in pages:
            self._check(page)

    def _check(self, page: PageEntry) -> None:
        target = self.targets[page.index].target
        self.missing[page.index] = "" if zlib.crc32(target.data) == page.checksum else "damaged"
        self.num_pages, self.bytes = self.num_pages + 1, self.bytes + len(target)
