"""Two engines of which one computes prompts and the other one what follows, in one process."""

from __future__ import annotations

from time import monotonic
from typing import Any

from mtpserve.config import DisaggregationConfig
from mtpserve.core.kv_transfer import PageOffer, PageSource
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.pages.kv_offload import TierOptions
from tests.spec.test_prefix_cache import PAGE, SHAPES, SYSTEM, facts
from tests.tiny import VOCAB, tiny_engine

BLOCK = 3 * PAGE * 24 * 4 + 32 * 4  # bytes of a page of "deepseek", with its boundary row
HOST = 1 << 22  # bytes of host memory for pages
FACTS = {"the model": "tiny"}
PROMPT = [*SYSTEM, *((5 * i) % VOCAB for i in range(15))]  # 37 tokens, 9 pages and one token


def node(mode: str, model: Any, shape: str = "chain", facts: dict[str, str] = FACTS, host: int = HOST, **options: Any) -> Engine:
    nodes = {name: options.pop(name) for name in list(options) if name.startswith("disaggregation")}
    config = DisaggregationConfig(disaggregation_mode=mode, disaggregation_bootstrap_port=0, **nodes)
    below = TierOptions(host if config.role else 0, nodes=config, facts=facts)
    return tiny_engine(model, SHAPES[shape], page_size=PAGE, below=below, fingerprint=b"tiny" * 4, **options)


def ask(engine: Engine, name: str, prompt: list[int], **asked: Any) -> None:
    request = {field: asked.pop(field) for field in ("source", "kv_offer_id", "salt") if field in asked}
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
    ask(engine, name, prompt, kv_offer_id=lease, max_tokens=1, **asked)
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


def computed_here(decode: Engine, model: Any, source: PageSource, reason: str, least: int = 9) -> None:
    """The text is right all the same, and the reason is counted."""
    ask(decode, "d", PROMPT, source=source, temperature=0.0)
    events = drain(decode)["d"]
    assert facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0))
    assert decode.stats.failed_pulls_total.get(reason, 0) >= least, decode.stats.failed_pulls_total


def later(prefill: Engine) -> None:
    """When all leases are over."""
    assert prefill._kv_connector is not None and prefill._kv_connector.sender is not None
    prefill._kv_connector.sender._leases.clock = lambda: monotonic() + 100
    _ = prefill.stats
    prefill._kv_connector.sender._leases.clock = monotonic


def free_blocks(engine: Engine) -> bool:
    kv_connector = engine._kv_connector
    assert kv_connector is not None
    return all(not any(host.pins) and len(host.free) + len(host.blocks) == len(host.pins) for host in kv_connector.groups)
