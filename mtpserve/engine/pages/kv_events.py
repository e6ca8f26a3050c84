"""What becomes of the prefix cache's pages, published for routers: events as vLLM 0.32 writes them, so that
its router, Dynamo and others read them.

    engine's thread: stored, removed, cleared … publish ──a queue that never waits──→ the sender's thread
    sender's thread: PUB, and ROUTER for what was missed

    PUB      (topic, number, batch)      number: 8 bytes, big-endian, consecutive
                                         batch: msgpack [time, [events], 0]
    ROUTER   (client, "", first number)  →  (client, "", topic, number, batch) …, the last with the number -1
                                            and no batch

A batch is what one step has changed. One that does not fit into the queue is dropped: its number is then
missing.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Sequence as Seq
from itertools import count
from threading import Thread
from time import time

import msgspec
import zmq

from mtpserve.config.kv_events import KVEventsConfig, is_local, listens
from mtpserve.core.errors import ConfigError

log = logging.getLogger(__name__)

# vLLM's names of the tiers, whatever the device is
MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
INBOX = "inproc://kv-events"
LONGEST_MESSAGE = 4096  # bytes that a subscriber may send: topics, and requests for what was missed
LINGER_MS = 500  # how long the last batches may take to leave
LAST = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Seq[int]
    block_size: int
    medium: str
    lora_id: None = None
    lora_name: None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    pass


class KVEvents:
    """core.observers.CacheObserver. Raises ConfigError for an endpoint that cannot be had. `endpoint`,
    `replay_endpoint`: where it really listens. It ends with `close`, or with the object, or with the
    process."""

    def __init__(self, config: KVEventsConfig, page_size: int, rank: int = 0) -> None:
        """`rank`: of the engine among several, said with each batch."""
        self._page_size, self._rank = page_size, rank
        self._pending: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._numbers, self._dropped = count(), 0
        self._encoder = msgspec.msgpack.Encoder()
        context = zmq.Context()
        try:
            publisher = Publisher(config, context)
        except ConfigError:
            context.destroy(linger=0)
            raise
        self.endpoint, self.replay_endpoint = publisher.endpoint, publisher.replay_endpoint
        self._queue = context.socket(zmq.PUSH)
        self._queue.set_hwm(config.max_queue_size)
        self._queue.connect(INBOX)
        thread = Thread(target=publisher.run, name="kv-events", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, context, self._queue, thread)

    def close(self) -> None:
        self._end()

    def stored(self, keys: Seq[bytes], parent: bytes | None, tokens: Seq[int], tier: str) -> None:
        before = None if parent is None else _hash(parent)
        self._pending.append(
            BlockStored([_hash(key) for key in keys], before, tokens, self._page_size, MEDIA[tier])
        )

    def removed(self, keys: Seq[bytes], tier: str) -> None:
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, BlockRemoved) or last.medium != MEDIA[tier]:
            self._pending.append(last := BlockRemoved([], MEDIA[tier]))
        last.block_hashes += map(_hash, keys)

    def cleared(self) -> None:
        self._pending = [AllBlocksCleared()]  # what was to be published before is void

    def publish(self) -> None:
        if not self._pending:
            return
        batch, self._pending = self._encoder.encode((time(), self._pending, self._rank)), []
        try:
            self._queue.send_multipart((next(self._numbers).to_bytes(8, "big"), batch), zmq.DONTWAIT)
        except zmq.Again:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("KV events are dropped: the queue of max_queue_size steps is full")


class Publisher:
    """What the thread owns: the sockets, and the last batches."""

    def __init__(self, config: KVEventsConfig, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._topic = config.topic.encode()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.set_hwm(1)  # the queue's bound is its sender's
        self._inbox.bind(INBOX)
        self._outbox = context.socket(zmq.PUB)
        self.endpoint = _open(self._outbox, config.endpoint, config.hwm)
        self._replay, self.replay_endpoint = None, config.replay_endpoint
        self._batches = deque[list[bytes]](maxlen=config.buffer_steps)  # the last, each with its number
        if config.replay_endpoint is not None:
            self._replay = context.socket(zmq.ROUTER)
            self.replay_endpoint = _open(
                self._replay, config.replay_endpoint, config.buffer_steps + 1, listen=True
            )

    def run(self) -> None:
        """Until an empty message comes."""
        poller = zmq.Poller()
        for socket in (self._inbox, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        open_ = True
        while open_:
            ready = dict(poller.poll())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._inbox in ready:
                open_ = self._forward(self._inbox.recv_multipart())
        for channel in (self._inbox, self._outbox, self._replay):
            if channel is not None:
                channel.close(linger=LINGER_MS)

    def _forward(self, message: list[bytes]) -> bool:
        if len(message) == 1:
            return False
        self._outbox.send_multipart([self._topic, *message])  # never waits: who reads too slowly misses it
        if self._replay is not None:
            self._batches.append(message)
        return True

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """The batches from a number on, as far as they are still there."""
        request = replay.recv_multipart()
        if len(request) != 3 or len(request[2]) != 8:
            log.debug("ignored a malformed request for KV events: it is not (client, '', 8 bytes)")
            return
        client, _, first = request
        for number, batch in list(self._batches):
            if number >= first:
                replay.send_multipart((client, b"", self._topic, number, batch))
        replay.send_multipart((client, b"", b"", LAST, b""))


def _hash(key: bytes) -> int:
    """The low 64 bits: a bytes key is what vLLM publishes only if it is told to."""
    return int.from_bytes(key[-8:], "big")


def _open(socket: zmq.Socket[bytes], endpoint: str, queued: int, listen: bool = False) -> str:
    """→ the endpoint, with the port that a * or 0 has become."""
    socket.set_hwm(queued)
    socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    listen = listen or listens(endpoint)
    try:
        (socket.bind if listen else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        action = "listen on" if listen else "connect to"
        raise ConfigError(
            f"--kv-events-config: cannot {action} {endpoint}: {zmq.strerror(error.errno or 0)}"
        ) from error
    if listen and not is_local(endpoint):
        log.warning(
            "KV events: everyone who can reach %s can read the tokens of all prompts and outputs", endpoint
        )
    address: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    log.info("KV events: %s %s", "listening on" if listen else "sent to", address)
    return address


def _end(context: zmq.Context[zmq.Socket[bytes]], queue: zmq.Socket[bytes], thread: Thread) -> None:
    queue.setsockopt(zmq.SNDTIMEO, LINGER_MS)
    try:
        queue.send(b"")
    except zmq.Again:
        return  # the thread does not run any more
    thread.join(LINGER_MS / 1000)
    if not thread.is_alive():
        queue.close()
        context.term()
