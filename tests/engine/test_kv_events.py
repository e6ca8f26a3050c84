"""Events of the prefix cache, as a router receives them: over real sockets, and what they say against what the cache really has."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, socket
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, strategies as st

from mtpserve.config import CacheConfig
from mtpserve.config.kv_events import is_local, listens, parse
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.pages.kv_events import LAST, AllBlocksCleared, BlockRemoved, BlockStored, KVEvents
from mtpserve.engine.startup.start import try_out
from mtpserve.llm import LLM
from tests import selection
from tests.engine.fake_runner import draw
from tests.engine.harness import VOCAB, Bench

PAGE = 4
SHARED = [draw("shared", i, below=VOCAB) for i in range(40)]
FREE = "tcp://127.0.0.1:*"


class Router:
    """A subscriber that knows nothing of this package: prefixes by hash, from the maps that it is sent."""

    def __init__(self, events: KVEvents, topic: str = "") -> None:
        self.events, self.context = events, zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(events.endpoint)
        self.sub.subscribe(topic)
        self.next = 0
        while not self.sub.poll(20):  # until the subscription has arrived
            events.cleared()
            events.publish()
            self.next += 1
        while int.from_bytes(self.sub.recv_multipart()[1], "big") < self.next - 1:
            assert self.sub.poll(5000)
        self.pages: dict[int, list[int]] = {}  # all tokens up to the page's end
        self.batches: list[list[Any]] = []
        self.media = set[str]()

    def read(self) -> None:
        """Everything that has been sent."""
        end = next(copy(self.events._numbers))
        while self.next < end:
            assert self.sub.poll(5000)
            _, number, batch = self.sub.recv_multipart()
            assert int.from_bytes(number, "big") == self.next, "consecutive"
            self.next += 1
            self.take(msgspec.msgpack.decode(batch))

    def take(self, batch: list[Any]) -> None:
        self.batches.append(batch)
        ts, events, rank = batch
        assert abs(ts - time.time()) < 60 and rank == 0 and events
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self.store(event)
                case "BlockRemoved":
                    assert event.keys() == {"type", "block_hashes", "medium"}
                    for page in event["block_hashes"]:
                        del self.pages[page]
                case "AllBlocksCleared":
                    self.pages.clear()

    def store(self, event: dict[str, Any]) -> None:
        hashes, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
        assert event.keys() == {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
        assert event["block_size"] == PAGE and len(tokens) == PAGE * len(hashes) and event["lora_id"] is event["lora_name"] is None
        assert all(0 <= each < 1 << 64 for each in hashes)
        before = [] if parent is None else self.pages[parent]
        for number, page in enumerate(hashes, 1):
            self.pages[page] = [*before, *tokens[: number * PAGE]]
        self.media.add(event["medium"])


@contextmanager
def published(page_size: int = PAGE, **fields: Any) -> Iterator[KVEvents]:
    events = KVEvents(parse(json.dumps({"endpoint": FREE, **fields})), page_size)
    try:
        yield events
    finally:
        events.close()


def ask(endpoint: str | None, first: int, count: int) -> list[tuple[bytes, bytes, bytes]]:
    """Topic, number and batch of each answer, once there are so many."""
    assert endpoint is not None
    answers = list[tuple[bytes, bytes, bytes]]()
    end = time.monotonic() + 60
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        while len(answers) != count:
            assert time.monotonic() < end, "what was published is not there"
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            answers = []
            while not answers or answers[-1][1] != LAST:
                assert dealer.poll(5000)
                empty, topic, number, batch = dealer.recv_multipart()
                assert empty == b""
                answers.append((topic, number, batch))
    return answers


def test_a_router_learns_what_every_page_contains() -> None:
    with published() as events:
        router, bench = Router(events), Bench(observer=events)
        bench.add("first", SHARED, 8)
        bench.drain()
        bench.add("second", [*SHARED[:20], *bench.texts["first"]], 4)
        bench.drain()
        router.read()
        first, second = [*SHARED, *bench.texts["first"]], [*SHARED[:20], *bench.texts["first"], *bench.texts["second"]]
        whole = {tuple(text[:end]) for text in (first, second) for end in range(PAGE, len(text), PAGE)}
        assert set(map(tuple, router.pages.values())) == whole and len(router.pages) == len(whole) == 11 + 2
        assert router.media == {"GPU"} and len(router.batches) <= bench.engine.stats.steps_total


def test_evicted_pages_and_an_emptied_cache() -> None:
    with published() as events:
        router, bench = Router(events), Bench(observer=events, pages=30)
        for i in range(6):
            bench.add(f"a{i}", [draw("long", i, j, below=VOCAB) for j in range(60)], 4)
            bench.drain()
        router.read()
        assert len(router.pages) == bench.engine.stats.pages_cached < 30
        bench.engine.reset_prefix_cache()
        router.read()
        assert router.pages == {} and [event["type"] for event in router.batches[-1][1]] == ["AllBlocksCleared"]


def test_what_was_missed_can_be_asked_for() -> None:
    with published(replay_endpoint=FREE, buffer_steps=5, topic="kv") as events:
        router = Router(events, "kv")
        for _ in range(8):
            events.cleared()
            events.publish()
        router.read()
        assert len(router.batches) == 8
        last = router.next - 1
        assert [int.from_bytes(number, "big") for _, number, _ in ask(events.replay_endpoint, last - 1, 3)[:-1]] == [last - 1, last]
        answers = ask(events.replay_endpoint, 0, 6)  # as far back as they are kept
        assert [int.from_bytes(number, "big") for _, number, _ in answers[:-1]] == list(range(last - 4, last + 1))
        assert {topic for topic, _, _ in answers[:-1]} == {b"kv"} and answers[-1] == (b"", LAST, b"")
        assert [msgspec.msgpack.decode(batch) for _, _, batch in answers[:-1]] == router.batches[3:]


def test_nonsense_from_clients_changes_nothing() -> None:
    with published(replay_endpoint=FREE) as events, zmq.Context() as context, context.socket(zmq.DEALER) as rude:
        assert events.replay_endpoint is not None
        rude.setsockopt(zmq.LINGER, 0)
        rude.connect(events.replay_endpoint)
        for message in ([b""], [b"", b"x"], [b"", b"", b"", b""], [b"", b"9" * 100_000]):
            rude.send_multipart(message)
        events.cleared()
        events.publish()
        assert len(ask(events.replay_endpoint, 0, 2)) == 2


def test_who_does_not_read_holds_up_nobody() -> None:
    with published(hwm=2, replay_endpoint=FREE, max_queue_size=100_000) as events:
        router = Router(events)  # does not read
        for i in range(3000):
            events.stored([i.to_bytes(16, "big")], None, list(range(1000)), "device")
            events.publish()
        assert len(ask(events.replay_endpoint, router.next + 2990, 11)) == 11
        router.sub.close(linger=0)


def test_a_full_queue_drops_batches_and_their_numbers_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    with published(max_queue_size=7) as events:
        router, real, full = Router(events), events._queue, events._queue.context.socket(zmq.PUSH)  # one that nobody takes from
        assert real.getsockopt(zmq.SNDHWM) == 7
        for events._queue in (real, full, full, real):
            events.cleared()
            events.publish()
        assert sum("KV events are dropped" in each.message for each in caplog.records) == 1
        router.sub.setsockopt(zmq.RCVTIMEO, 5000)
        numbers = [int.from_bytes(router.sub.recv_multipart()[1], "big") for _ in range(2)]
        assert numbers == [router.next, router.next + 3]
        full.close()


def test_a_trial_is_not_published() -> None:
    """The first batch clears what a router knows of an engine that was there before."""
    with published() as events:
        router, bench = Router(events), Bench(observer=events)
        try_out(bench.engine)
        router.read()
        assert [batch[1] for batch in router.batches] == [[{"type": "AllBlocksCleared"}]]


def test_tiers_have_vllms_names() -> None:
    with published() as events:
        router, key = Router(events), b"\xff" * 8 + bytes(range(8))
        for tier in ("device", "host", "disk"):
            events.stored([key], None, [1, 2, 3, 4], tier)
        events.publish()
        router.read()
        assert router.media == {"GPU", "CPU", "STORAGE"} and list(router.pages) == [0x0001020304050607]


def test_pages_that_go_together_are_one_event() -> None:
    with published() as events:
        for i in range(3):
            events.removed([bytes([i] * 16)], "device")
        events.removed([b"x" * 16], "host")
        assert [len(event.block_hashes) for event in events._pending if isinstance(event, BlockRemoved)] == [3, 1]


def test_it_ends_and_its_ports_are_free_again(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    for _ in range(2):
        with published(endpoint=endpoint, replay_endpoint=FREE) as events:
            thread = events._end
        assert not thread.alive
    with published() as first, pytest.raises(ConfigError, match=r"--kv-events-config: cannot listen on tcp://127.* in use"):
        KVEvents(parse(json.dumps({"endpoint": first.endpoint})), PAGE)


def test_another_machines_endpoint_is_connected_to(caplog: pytest.LogCaptureFixture) -> None:
    here = ["tcp://*:5557", "tcp://[::]:5557", "ipc:///run/kv", "tcp://127.0.0.1:5557", "tcp://localhost:1", "tcp://[::1]:5557"]
    assert [listens(each) for each in here] == [True] * 6 and [is_local(each) for each in here] == [False, False, True, True, True, True]
    assert not any(listens(each) for each in ("tcp://10.0.0.7:5557", "tcp://router:5557", "tcp://[fe80:0:0:0:0:0:0:1]:5557"))
    with published(endpoint="tcp://*:*"):
        assert "everyone who can reach" in caplog.text
    elsewhere = f"tcp://{not_loopback()}:1"
    with published(endpoint=elsewhere) as events:
        assert events.endpoint == elsewhere


def not_loopback() -> str:
    """This machine's address, where nobody listens at port 1, or another one, where it has none. What answers at others may not be ZeroMQ:
    libzmq 4.3 ends the process when such a peer says something while the socket is closed (zmtp_engine.cpp, EAGAIN)."""
    with socket(AF_INET, SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))  # nothing is sent
        except OSError:
            return "10.255.0.7"
        own: str = probe.getsockname()[0]
    return "10.255.0.7" if own.startswith("127.") else own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zmq", "--kv-events-config must be a JSON object, got 'zmq'"),
        ("[]", "--kv-events-config must be a JSON object"),
        ('{"publisher": "kafka"}', "--kv-events-config: publisher must be zmq or null, got 'kafka'"),
        ('{"hwm": 0}', "--kv-events-config: hwm must be a number of at least 1, got 0"),
        ('{"endpoint": "5557"}', "--kv-events-config: endpoint must be like tcp://host:5557 or ipc://path, got '5557'"),
        ('{"enable": true}', "unknown key 'enable' in --kv-events-config; accepted: enable_kv_cache_events, publisher, "),
    ],
)
def test_what_means_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CacheConfig(kv_events_config=text)
    assert str(refused.value).startswith(message)


def test_how_events_are_turned_on() -> None:
    def events(text: str | None, **other: Any) -> Any:
        return CacheConfig(kv_events_config=text, **other).kv_events

    assert events(None) is None and events('{"publisher": "null"}') is None and events('{"enable_kv_cache_events": false}') is None
    sglangs, vllms = events('{"publisher": "zmq", "topic": "kv-events"}'), events('{"enable_kv_cache_events": true, "publisher": "zmq"}')
    assert sglangs.topic == "kv-events" and vllms.endpoint == "tcp://127.0.0.1:5557"
    with pytest.raises(ConfigError, match="left out with --disable-radix-cache"):
        events("{}", disable_radix_cache=True)


def test_an_engine_publishes_until_it_is_closed() -> None:
    with published() as free:
        replay = free.endpoint
    options: dict[str, Any] = {"kv_events_config": json.dumps({"endpoint": FREE, "replay_endpoint": replay}), "max_total_tokens": 256}
    prompt = "import os\nimport sys\nimport re\n" * 3
    for _ in range(2):
        with LLM("demo", **options) as llm:
            tokens = llm.tokenizer.encode(prompt)
            llm.generate([prompt], SamplingParams(max_tokens=1))
            (_, _, batch), _ = ask(replay, 0, 2)
            (stored,) = msgspec.msgpack.decode(batch)[1]
            assert stored["token_ids"] == tokens[: len(tokens) // 16 * 16] and stored["block_size"] == 16
            with pytest.raises(ConfigError, match="Address already in use"):
                LLM("demo", **options)


class Mirror(KVEvents):
    """What a client knows that has applied all events, without the sockets."""

    def __init__(self) -> None:
        self._page_size, self._pending, self.known = PAGE, [], set[int]()

    def publish(self) -> None:
        for event in self._pending:
            match event:
                case BlockStored(block_hashes=hashes):
                    self.known |= set(hashes)
                case BlockRemoved(block_hashes=hashes):
                    assert self.known >= set(hashes), "what was never stored"
                    self.known -= set(hashes)
                case AllBlocksCleared():
                    self.known.clear()
        self._pending = []

    def close(self) -> None:
        pass


@selection.examples(60)
@given(data=st.data())
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_who_applies_all_events_knows_what_can_be_found(data: st.DataObject, windows: tuple[int | None, ...], overlap: int) -> None:
    mirror, pages = Mirror(), data.draw(st.integers(24, 60))
    bench = Bench(
        windows=windows, pages=(pages,) * len(windows), overlap=overlap, budget=data.draw(st.integers(8, 40)), context=80,
        drafts=data.draw(st.integers(0, 3)), running=data.draw(st.integers(1, 5)), observer=mirror,
    )  # fmt: skip
    allocator = bench.engine._pages.groups[0].allocator

    def step() -> None:
        bench.step()
        assert mirror.known == {int.from_bytes(key[-8:], "big") for key in allocator._pages}

    prompts = [SHARED[:20], SHARED[:33], list[int]()]
    names = map(str, count())
    for _ in range(data.draw(st.integers(2, 14))):
        name = next(names)
        prompts.append([*data.draw(st.sampled_from(prompts)), *(draw(name, i, below=VOCAB) for i in range(4))][:50])
        bench.add(name, prompts[-1], data.draw(st.integers(1, 12)), salt=data.draw(st.sampled_from(["", "x"])))
        if data.draw(st.integers(0, 6)) == 0:
            bench.runner.fail_ids.add(name)
        for _ in range(data.draw(st.integers(0, 4))):
            step()
        if data.draw(st.integers(0, 9)) == 0:
            bench.engine.abort(name)
        if data.draw(st.integers(0, 9)) == 0:
            bench.engine.reset_prefix_cache()
            assert not mirror.known
    while bench.engine.has_work:
        step()
