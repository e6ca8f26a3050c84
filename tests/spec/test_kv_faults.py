"""Nodes that die, differ, are late or send something else: the text is the same, why is counted, and nothing stays held."""

from __future__ import annotations

import socket
import threading
import zlib
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from mtpserve.cache.leases import Leases
from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.kv_transfer import PageSource
from mtpserve.engine.startup.fingerprint import facts as known_facts
from mtpserve.engine.startup.planning import plan
from mtpserve.runtime.remote.server import Readers
from mtpserve.runtime.remote.wire import LENGTH, Hello, WantPages, differing, receive, send
from tests.spec.nodes import BLOCK, PROMPT, ask, computed_here, drain, free_blocks, later, node, prefilled, source
from tests.spec.test_prefix_cache import PAGE
from tests.tiny import VOCAB, tiny_model


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


def test_what_differs_is_said_in_words() -> None:
    """A prefill node that was started without the draft layer would send pages without its part."""
    nodes = [EngineConfig(spec=spec) for spec in (SpecConfig(speculative_algorithm="NEXTN"), SpecConfig(speculative_algorithm="none"))]
    nodes += [replace(nodes[0], cache=CacheConfig(page_size=32)), replace(nodes[0], model=ModelConfig(dtype="float16"))]
    first, *others = [known_facts(config, plan(config)) for config in nodes]
    assert differing(first, dict(first)) is None
    found = [differing(first, other) for other in others]
    for said, name in zip(found, ("layers in a page: ", "page size: 16 here, 32 there", "number format: torch."), strict=True):
        assert said is not None and said.startswith(name), said


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
    assert free_blocks(prefill)


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
    assert sum(event.num_cached_tokens for event in drain(decode)["d"]) == 36


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
    assert free_blocks(prefill), "nothing stays pinned"


def test_a_decode_node_that_never_comes() -> None:
    """Its pages make room for others' once the lease is over, and not before."""
    model = tiny_model()
    prefill = node("prefill", model, host=12 * BLOCK)
    for i in range(4):
        prefilled(prefill, [(i * 7 + j) % VOCAB for j in range(37)], name=f"{i}", lease=f"{i}")
        assert prefill.stats.leased_pages == (9, 12, 12, 12)[i]
    later(prefill)
    assert prefill.stats.leased_pages == 0 and prefill.stats.expired_leases_total == 4 and free_blocks(prefill)
    prefilled(prefill, PROMPT)
    assert prefill.stats.leased_pages == 9


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
    assert free_blocks(decode)
