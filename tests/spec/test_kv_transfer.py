"""One engine computes prompts, another one what follows: text, drafts and acceptance are those of one engine that had the prompt cached."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from mtpserve.cache.leases import Leases
from mtpserve.config import DisaggregationConfig
from mtpserve.core.kv_transfer import PageOffer, PageSource
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.below import TierOptions
from mtpserve.engine.engine import Engine
from mtpserve.runtime.remote.server import Readers
from mtpserve.runtime.remote.wire import LENGTH, Hello, WantPages, receive, send
from tests.spec.test_prefix_cache import PAGE, SHAPES, SYSTEM, facts
from tests.tiny import VOCAB, tiny_engine, tiny_model

BLOCK = 3 * PAGE * 24 * 4 + 32 * 4  # bytes of a page of "deepseek", with its boundary row
HOST = 1 << 22  # bytes of host memory for pages
FACTS = {"the model": "tiny"}
LAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 3}}
opened: list[Engine] = []


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


def node(mode: str, model: Any, shape: str = "chain", facts: dict[str, str] = FACTS, host: int = HOST, **options: Any) -> Engine:
    nodes = {name: options.pop(name) for name in list(options) if name.startswith("disaggregation")}
    config = DisaggregationConfig(disaggregation_mode=mode, disaggregation_bootstrap_port=0, **nodes)
    below = TierOptions(host if config.role else 0, nodes=config, facts=facts)
    engine = tiny_engine(model, SHAPES[shape], page_size=PAGE, below=below, fingerprint=b"tiny" * 4, **options)
    opened.append(engine)
    return engine


def ask(engine: Engine, name: str, prompt: list[int], **asked: Any) -> None:
    request = {field: asked.pop(field) for field in ("source", "lease", "salt") if field in asked}
    engine.add(Request(name, prompt, SamplingParams(**{"max_tokens": 18} | asked), **request))


def drain(*engines: Engine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    while any(engine.has_work for engine in engines):
        for engine in engines:
            for event in engine.step():
                assert event.error is None
                events.setdefault(event.id, []).append(event)
            engine.check_integrity()
    return events


def prefilled(engine: Engine, prompt: list[int], name: str = "p", lease: str = "L", **asked: Any) -> PageOffer:
    """As a router does it: one token of which nobody hears."""
    ask(engine, name, prompt, lease=lease, max_tokens=1, **asked)
    offer = drain(engine)[name][-1].offer
    assert offer is not None
    return offer


def source(offer: PageOffer, **changed: Any) -> PageSource:
    given = PageSource(offer.host, offer.port, offer.lease)
    return PageSource(**{name: getattr(given, name) for name in given.__struct_fields__} | changed)


def single(model: Any, shape: str, prompt: list[int], **asked: Any) -> list[TokenEvent]:
    """One node, which has just computed the same prompt."""
    engine = node("null", model, shape)
    ask(engine, "warm", prompt, max_tokens=1, temperature=0.0)
    drain(engine)
    ask(engine, "d", prompt, **asked)
    return drain(engine)["d"]


PROMPT = [*SYSTEM, *((5 * i) % VOCAB for i in range(15))]  # 37 tokens, 9 pages and one token


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["deepseek", "mimo", "modules", "chained", "hybrid"])
def test_the_same_as_on_one_node(family: str, shape: str, law: str) -> None:
    if family in ("modules", "chained") and shape == "tree":
        pytest.skip("a tree is no different there")
    model = tiny_model(family)
    prefill, decode = node("prefill", model, shape), node("decode", model, shape)
    offer = prefilled(prefill, PROMPT, **LAWS[law])
    ask(decode, "d", PROMPT, source=source(offer), **LAWS[law])
    events = drain(decode)["d"]
    assert facts(events) == facts(single(model, shape, PROMPT, **LAWS[law]))
    assert sum(event.cached for event in events) == offer.columns * PAGE == 36
    stats = decode.stats
    assert stats.transfers_total["pull"] >= 9 and not stats.failed_pulls_total and stats.transfer_bytes_total["pull"] > 0
    assert prefill.stats.drafts_total == 0 and (shape == "plain" or stats.drafts_total > 0)
    assert prefill.stats.transfers_total["send"] == stats.transfers_total["pull"]
    assert prefill.stats.leased_pages == 0 and prefill.stats.leases_total == 1 and prefill.stats.expired_leases_total == 0


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_windows_and_each_way(way: str) -> None:
    model = tiny_model("mimo", window=10)
    prefill, decode = node("prefill", model, budget=16), node("decode", model, budget=16, disaggregation_transfer_backend=way)
    offer = prefilled(prefill, PROMPT, temperature=0.0)
    ask(decode, "d", PROMPT, source=source(offer), temperature=0.0)
    events = drain(decode)["d"]
    assert facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0))
    assert sum(event.cached for event in events) == 36 and not decode.stats.failed_pulls_total


def test_only_what_is_lacking_is_asked_for() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    ask(decode, "first", SYSTEM, temperature=0.0, max_tokens=2)
    drain(decode)
    ask(decode, "d", PROMPT, source=source(prefilled(prefill, PROMPT)), temperature=0.0)
    assert sum(event.cached for event in drain(decode)["d"]) == 36
    assert decode.stats.transfers_total["pull"] == 9 - len(SYSTEM) // PAGE


def test_choices_of_one_prompt_share_what_comes() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    for i in range(3):
        ask(prefill, f"p{i}", PROMPT, lease="L", max_tokens=1)
    offer = drain(prefill)["p0"][-1].offer
    assert offer is not None
    for i in range(3):
        ask(decode, f"d{i}", PROMPT, source=source(offer), temperature=0.8, seed=i)
    events = drain(decode)
    for i in range(3):
        assert [t for e in events[f"d{i}"] for t in e.tokens] == [
            t for e in single(model, "chain", PROMPT, temperature=0.8, seed=i) for t in e.tokens
        ]
    assert decode.stats.transfers_total["pull"] == 9


def test_a_decode_node_waits_for_a_prompt_that_is_still_being_computed() -> None:
    """As SGLang's routers do it, which call both nodes at once. Others run meanwhile."""
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    here = source(prefilled(prefill, [1, 2, 3, 4, 5], lease="other"), lease="room", waits=True)
    ask(decode, "d", PROMPT, source=here, temperature=0.0)
    ask(decode, "other", SYSTEM, temperature=0.0)
    seen = list[TokenEvent]()
    while not any(event.id == "other" and event.finish for event in seen):
        seen += decode.step()
    assert {event.id for event in seen} == {"other"}
    ask(prefill, "p", PROMPT, lease="room", max_tokens=1)
    events = drain(prefill, decode)["d"]
    assert facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0)) and sum(event.cached for event in events) == 36


def test_nobody_waits_for_a_prompt_that_will_not_be_computed() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    here = source(prefilled(prefill, [1, 2, 3, 4, 5]), lease="room", waits=True)
    ask(decode, "d", PROMPT, source=here, temperature=0.0)
    decode.step()
    ask(prefill, "p", PROMPT, lease="room", max_tokens=1)
    prefill.abort("p")
    assert facts(drain(prefill, decode)["d"]) == facts(single(model, "chain", PROMPT, temperature=0.0))


def test_pages_come_while_a_request_waits_for_a_seat() -> None:
    """Its lease may be over by the time that it gets one."""
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model, seats=1)
    ask(decode, "long", SYSTEM, temperature=0.0, max_tokens=60)
    decode.step()
    ask(decode, "d", PROMPT, source=source(prefilled(prefill, PROMPT)), temperature=0.0)
    while not decode.stats.transfers_total.get("pull"):
        assert not any(event.finish for event in decode.step())
    later(prefill)
    assert sum(event.cached for event in drain(decode)["d"]) == 36


def test_salts_share_nothing() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    offer = prefilled(prefill, PROMPT, salt="one")
    ask(decode, "d", PROMPT, source=source(offer), salt="two", temperature=0.0)
    events = drain(decode)["d"]
    assert sum(event.cached for event in events) == 0 and decode.stats.failed_pulls_total == {"absent": 9}
    assert facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0))


# ------------------------------------------------------------------------------------------------------------------ faults


def computed_here(decode: Engine, model: Any, source: PageSource, reason: str, least: int = 9) -> None:
    """The text is right all the same, and the reason is counted."""
    ask(decode, "d", PROMPT, source=source, temperature=0.0)
    events = drain(decode)["d"]
    assert facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0))
    assert decode.stats.failed_pulls_total.get(reason, 0) >= least, decode.stats.failed_pulls_total


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_a_damaged_page(way: str) -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model, disaggregation_transfer_backend=way)
    offer = prefilled(prefill, PROMPT)
    receive, hit = _damaging()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtpserve.runtime.remote.client.zlib.crc32", receive)
        computed_here(decode, model, source(offer), "damaged", least=1)
    assert hit and sum(decode.stats.failed_pulls_total.values()) == 1
    assert decode.stats.cached_prompt_tokens_total == 3 * PAGE, "the pages before it are used"


def _damaging() -> tuple[Any, list[int]]:
    """The fourth page's bytes are not those that were sent."""
    own, hit = zlib.crc32, list[int]()

    def checksum(content: Any) -> int:
        if threading.current_thread().name == "pull pages":
            hit.append(len(content))
            if len(hit) == 4:
                content[7] ^= 1
        return own(content)

    return checksum, hit


def test_nodes_that_differ() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model, facts={"the model": "another"}), node("decode", model)
    computed_here(decode, model, source(prefilled(prefill, PROMPT)), "differs")
    other = node("prefill", tiny_model(layers=3))
    computed_here(node("decode", model), model, source(prefilled(other, PROMPT)), "differs")


def test_a_prefill_node_that_died_before() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    offer = prefilled(prefill, PROMPT)
    prefill.close()
    computed_here(decode, model, source(offer), "unreachable")


def test_a_prefill_node_that_dies_while_it_sends() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model, disaggregation_transfer_backend="tcp")
    offer, own, sent = prefilled(prefill, PROMPT), Readers._bytes, list[int]()

    def dying(self: Readers, group: int, block: int) -> memoryview:
        sent.append(block)
        if len(sent) == 9 + 5:  # after the checksums
            raise ConnectionResetError("killed")
        return own(self, group, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Readers, "_bytes", dying)
        computed_here(decode, model, source(offer), "broken", least=5)
    assert decode.stats.cached_prompt_tokens_total == 4 * PAGE, "what had arrived is used"
    later(prefill)
    assert _free_blocks(prefill)


def test_a_prefill_node_that_dies_while_it_is_waited_for() -> None:
    model = tiny_model()
    decode = node("decode", model)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                hello = receive(connection, Hello)
                send(connection, hello)
                receive(connection, WantPages)

        thread = threading.Thread(target=answer)
        thread.start()
        computed_here(decode, model, PageSource("127.0.0.1", listener.getsockname()[1], "room", waits=True), "timeout")
        thread.join()


def test_a_node_that_says_nothing_or_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.runtime.remote.client.QUIET_S", 0.05)
    model = tiny_model()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = PageSource("127.0.0.1", listener.getsockname()[1], "L")
        computed_here(node("decode", model), model, here, "broken")
        connection = listener.accept()[0]
        connection.close()
        for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", LENGTH.pack(4) + b"\x93abc"):
            thread = threading.Thread(target=lambda answer=answer: listener.accept()[0].sendall(answer))
            thread.start()
            computed_here(node("decode", model), model, here, "broken")
            thread.join()


def test_a_reader_that_says_nonsense() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    offer = prefilled(prefill, PROMPT)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", LENGTH.pack(3) + b"abc", b""):
        with socket.create_connection((offer.host, offer.port)) as connection:
            connection.sendall(nonsense)
    ask(decode, "d", PROMPT, source=source(offer), temperature=0.0)
    assert sum(event.cached for event in drain(decode)["d"]) == 36


def test_a_page_that_is_not_the_leases_any_more_is_not_sent() -> None:
    """Its block may have got another page while it was read."""
    leases = Leases(10)
    leases.offer("L", {(0, b"k"): 3})
    assert leases.find("L", False, 0) == {(0, b"k"): 3} and leases.holds("L", [(0, b"k")])
    leases.clock = lambda: monotonic() + 11
    assert leases.find("L", False, 0) is None and not leases.holds("L", [(0, b"k")])
    assert leases.take_ended() == [{(0, b"k"): 3}] and leases.take_ended() == [] and not leases.is_open
    assert leases.find("L", True, 60) is None, "nobody waits for what has ended"


def test_a_lease_that_is_over() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    offer = prefilled(prefill, PROMPT)
    assert prefill.changes_idle and prefill.stats.leased_pages == 9
    later(prefill)
    assert prefill.stats.expired_leases_total == 1 and not prefill.changes_idle
    computed_here(decode, model, source(offer), "ended")
    assert _free_blocks(prefill), "nothing stays pinned"


def test_a_decode_node_that_never_comes() -> None:
    """Its pages make room for others' once the lease is over, and not before."""
    model = tiny_model()
    prefill = node("prefill", model, host=12 * BLOCK)
    for i in range(4):
        prefilled(prefill, [(i * 7 + j) % VOCAB for j in range(37)], name=f"{i}", lease=f"{i}")
        assert prefill.stats.leased_pages == (9, 12, 12, 12)[i]
    later(prefill)
    assert prefill.stats.leased_pages == 0 and prefill.stats.expired_leases_total == 4 and _free_blocks(prefill)
    prefilled(prefill, PROMPT)
    assert prefill.stats.leased_pages == 9


def later(prefill: Engine) -> None:
    """When all leases are over."""
    assert prefill._tiers is not None and prefill._tiers.exports is not None
    prefill._tiers.exports._leases.clock = lambda: monotonic() + 100
    _ = prefill.stats
    prefill._tiers.exports._leases.clock = monotonic


def test_no_prompt_is_computed_in_time() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model, disaggregation_timeout=0.05)
    here = source(prefilled(prefill, [1, 2, 3, 4, 5]), lease="nobody's", waits=True)
    computed_here(decode, model, here, "timeout")
    computed_here(node("decode", model), model, PageSource(here.host, here.port, here.lease), "ended")


def test_host_memory_that_is_too_small() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model, host=5 * BLOCK)
    computed_here(decode, model, source(prefilled(prefill, PROMPT)), "no_room")


def test_who_is_aborted_while_its_pages_come_leaves_nothing_behind() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model, disaggregation_timeout=0.3)
    here = source(prefilled(prefill, [1, 2, 3, 4, 5]), lease="room", waits=True)
    ask(decode, "d", PROMPT, source=here)
    decode.step()
    decode.abort("d")
    drain(decode)
    assert _free_blocks(decode)


def _free_blocks(engine: Engine) -> bool:
    tiers = engine._tiers
    assert tiers is not None
    return all(not any(host.pins) and len(host.free) + len(host.blocks) == len(host.pins) for host in tiers.host)
