"""Reads pages from the node that has computed them. What does not arrive whole is not there: the caller computes it."""

from __future__ import annotations

import logging
import socket
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from mtpserve.cache.keys import Key
from mtpserve.core.kv_transfer import PageSource
from mtpserve.runtime.remote.memory import Mapped
from mtpserve.runtime.remote.wire import Done, Give, Given, Hello, WantPages, differing, receive, receive_into, send

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
    """Why each wanted page is not there; "": it is."""

    missing: list[str]
    seconds: float  # without those in which the pages were still being computed


class PageClient:
    """For several threads. `seconds`: how long a request may wait for pages that are still being computed. `way`: auto: from the other
    node's memory where that can be opened, else by TCP; shm, tcp: one of these alone."""

    def __init__(self, facts: dict[str, str], seconds: float, way: str) -> None:
        self._facts, self._seconds, self._way = facts, seconds, way
        self._mapped = Mapped()

    def fetch(self, source: PageSource, wanted: Seq[WantedPage]) -> Fetched:
        """Raises nothing: whatever goes wrong is why a page is not there."""
        began, missing = perf_counter(), ["unreachable"] * len(wanted)
        where = f"pages of {source.host} port {source.port}"
        try:
            with socket.create_connection((source.host, source.port), CONNECT_S) as connection:
                answered = self._talk(connection, source, wanted, missing)
                began = answered if source.waits else began
        except (OSError, ValueError) as error:
            log.warning("%s: %s: the prompt is computed here", where, error or type(error).__name__)
        bad = sorted({why for why in missing if why})
        if bad:
            log.warning("%s: %d of %d are not there (%s)", where, sum(map(bool, missing)), len(missing), ", ".join(bad))
        return Fetched(missing, perf_counter() - began)

    def _talk(self, connection: socket.socket, source: PageSource, wanted: Seq[WantedPage], missing: list[str]) -> float:
        """Fills in `missing` page by page, so that what has arrived when it raises is there. → when the other node had the pages."""

        def all_are(why: str) -> None:
            missing[:] = [why] * len(missing)

        connection.settimeout(QUIET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        all_are("broken")
        send(connection, Hello(self._facts))
        hello = receive(connection, Hello)
        if (difference := differing(self._facts, hello.facts)) is not None:
            all_are("differs")
            raise ValueError(f"it computes them in another way: {difference}")
        memory = None if self._way == "tcp" or hello.memory is None else self._mapped.open(hello.memory)
        if memory is None and self._way == "shm":
            all_are("unreachable")
            raise ValueError("--disaggregation-transfer-backend shm: its memory cannot be opened, since it is not on this machine")
        pages = [(each.group, each.key) for each in wanted]
        send(connection, WantPages(source.lease, source.waits, self._seconds, pages, memory is not None))
        connection.settimeout(self._seconds + QUIET_S)
        all_are("timeout")
        give = receive(connection, Give)
        connection.settimeout(QUIET_S)
        all_are("absent" if give.known else "timeout" if source.waits else "ended")
        if any(not 0 <= given.index < len(wanted) for given in give.pages):
            raise ValueError("it gives pages that were not asked for")
        for given in give.pages:
            missing[given.index] = "broken"
        began, size = perf_counter(), 0
        for given in give.pages:
            missing[given.index] = self._take(connection, given, wanted[given.index], memory)
            size += len(wanted[given.index].target)
        send(connection, Done(len(give.pages), size, perf_counter() - began))
        return began

    def _take(self, connection: socket.socket, given: Given, wanted: WantedPage, memory: np.ndarray | None) -> str:
        target = wanted.target
        if memory is None:
            receive_into(connection, target.data)
        else:
            np.copyto(target, memory[given.start : given.start + len(target)])
        return "" if zlib.crc32(target.data) == given.checksum else "damaged"
