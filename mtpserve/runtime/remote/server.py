"""Serves the pages that leases hold, in threads beside the engine's. It reads blocks and changes nothing."""

from __future__ import annotations

import logging
import socket
import uuid
import weakref
import zlib
from threading import BoundedSemaphore, Thread

from torch import Tensor

from mtpserve.cache.leases import Leases, Place
from mtpserve.core.errors import ConfigError
from mtpserve.runtime.remote.nixl import Nixl
from mtpserve.runtime.remote.shared_memory import SharedBlocks
from mtpserve.runtime.remote.wire import Done, Give, Hello, PageEntry, WantPages, differing, receive, send

log = logging.getLogger(__name__)

MOST = 256  # connections at once; more wait
QUIET_S = 30.0  # how long a reader may say nothing
LONGEST_WAIT_S = 3600.0
TOGETHER = 32  # pages that are checked before the reader hears of them


class PageServer:
    """`facts`: see Hello. Listens at once: raises ConfigError for an address that cannot be had."""

    def __init__(
        self,
        host: str,
        port: int,
        facts: dict[str, str],
        blocks: SharedBlocks,
        leases: Leases,
        nixl: Nixl | None = None,
    ) -> None:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=MOST)
        except OSError as error:
            raise ConfigError(
                f"--disaggregation-bootstrap-port: cannot listen on {host} port {port}: {error.strerror}"
            ) from error
        self.host, self.port, self.engine = host, int(listener.getsockname()[1]), uuid.uuid4().hex
        log.info("serving KV pages for decode nodes on %s port %d", host, self.port)
        self._end = weakref.finalize(self, _close, listener)
        Thread(
            target=_listen,
            args=(listener, Readers(facts, blocks, leases, nixl)),
            name="page-server",
            daemon=True,
        ).start()

    def close(self) -> None:
        self._end()


def _close(listener: socket.socket) -> None:
    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


def _listen(listener: socket.socket, readers: Readers) -> None:
    free = BoundedSemaphore(MOST)
    while True:
        free.acquire()
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed

        def serve(connection: socket.socket = connection) -> None:
            try:
                with connection:
                    readers.serve(connection)
            finally:
                free.release()

        Thread(target=serve, name="page-reader", daemon=True).start()


class Readers:
    """What each connection does."""

    def __init__(
        self, facts: dict[str, str], blocks: SharedBlocks, leases: Leases, nixl: Nixl | None
    ) -> None:
        self._blocks, self._leases = blocks, leases
        self._nixl = nixl  # as long as it lives, others read by it
        self._hello = Hello(
            facts, blocks.address, b"" if nixl is None else nixl.metadata, blocks.tensor.data_ptr()
        )
        self._views: list[Tensor] = blocks.blocks

    def serve(self, connection: socket.socket) -> None:
        connection.settimeout(QUIET_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader = receive(connection, Hello)
            send(connection, self._hello)
            if (difference := differing(self._hello.facts, reader.facts)) is not None:
                log.warning("a decode node requests KV pages that it cannot use: %s", difference)
                return
            want = receive(connection, WantPages)
            self._give(connection, want)
            done = receive(connection, Done)
            self._leases.release(want.lease, done.pages, done.bytes, done.seconds)
        except (OSError, ValueError) as error:
            log.debug("a decode node closed its connection: %s", error)

    def _give(self, connection: socket.socket, want: WantPages) -> None:
        pages = self._leases.find(want.lease, want.waits, min(max(want.seconds, 0), LONGEST_WAIT_S))
        if pages is None:
            send(connection, Give(False, []))
            return
        there = [(index, page_id) for index, page_id in enumerate(want.pages) if page_id in pages]
        for start in range(0, max(len(there), 1), TOGETHER):
            some = there[start : start + TOGETHER]
            batch = [self._entry(index, page_id, pages[page_id]) for index, page_id in some]
            # What was not theirs any more while the checksums were taken has the wrong ones.
            good = self._leases.holds(want.lease, (page_id for _, page_id in some))
            send(connection, Give(good, batch if good else [], more=good and start + TOGETHER < len(there)))
            if not good:
                return
            if not want.copies:
                for _, page_id in some:
                    connection.sendall(self._bytes(page_id[0], pages[page_id]))

    def _entry(self, index: int, page_id: Place, block: int) -> PageEntry:
        group = page_id[0]
        return PageEntry(
            index, self._blocks.byte_range(group, block)[0], zlib.crc32(self._bytes(group, block))
        )

    def _bytes(self, group: int, block: int) -> memoryview:
        view: memoryview = self._views[group][block].numpy().data
        return view
