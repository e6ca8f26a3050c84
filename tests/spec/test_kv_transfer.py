"""One engine computes prompts, another one what follows: text, drafts and acceptance are those of one engine that had the prompt cached."""

from __future__ import annotations

from typing import Any

import pytest

from mtpserve.core.request import TokenEvent
from tests.spec.diagonal import diagonal
from tests.spec.nodes import PROMPT, ask, drain, free_blocks, later, node, prefilled, single, source
from tests.spec.test_prefix_cache import PAGE, SYSTEM, facts
from tests.tiny import VOCAB, tiny_model

LAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 3}}


@pytest.mark.parametrize(
    ("family", "shape", "law"), diagonal(["modules", "deepseek", "mimo", "chained", "hybrid"], ["chain", "tree", "plain"], LAWS.keys())
)
def test_the_same_as_on_one_node(family: str, shape: str, law: str) -> None:
    if family in ("modules", "chained") and shape == "tree":
        pytest.skip("a tree is no different there")
    model = tiny_model(family)
    prefill, decode = node("prefill", model, shape), node("decode", model, shape)
    offer = prefilled(prefill, PROMPT, **LAWS[law])
    ask(decode, "d", PROMPT, source=source(offer), **LAWS[law])
    events = drain(decode)["d"]
    assert facts(events) == facts(single(model, shape, PROMPT, **LAWS[law]))
    assert sum(event.num_cached_tokens for event in events) == offer.columns * PAGE == 36
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
    assert sum(event.num_cached_tokens for event in events) == 36 and not decode.stats.failed_pulls_total


def test_only_what_is_lacking_is_asked_for() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    ask(decode, "first", SYSTEM, temperature=0.0, max_tokens=2)
    drain(decode)
    ask(decode, "d", PROMPT, source=source(prefilled(prefill, PROMPT)), temperature=0.0)
    assert sum(event.num_cached_tokens for event in drain(decode)["d"]) == 36
    assert decode.stats.transfers_total["pull"] == 9 - len(SYSTEM) // PAGE


def test_choices_of_one_prompt_share_what_comes() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    for i in range(3):
        ask(prefill, f"p{i}", PROMPT, kv_offer_id="L", max_tokens=1)
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
    ask(prefill, "p", PROMPT, kv_offer_id="room", max_tokens=1)
    events = drain(prefill, decode)["d"]
    assert (
        facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0)) and sum(event.num_cached_tokens for event in events) == 36
    )


def test_nobody_waits_for_a_prompt_that_will_not_be_computed() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    here = source(prefilled(prefill, [1, 2, 3, 4, 5]), lease="room", waits=True)
    ask(decode, "d", PROMPT, source=here, temperature=0.0)
    decode.step()
    ask(prefill, "p", PROMPT, kv_offer_id="room", max_tokens=1)
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
    assert sum(event.num_cached_tokens for event in drain(decode)["d"]) == 36


def test_salts_share_nothing() -> None:
    model = tiny_model()
    prefill, decode = node("prefill", model), node("decode", model)
    offer = prefilled(prefill, PROMPT, salt="one")
    ask(decode, "d", PROMPT, source=source(offer), salt="two", temperature=0.0)
    events = drain(decode)["d"]
    assert sum(event.num_cached_tokens for event in events) == 0 and decode.stats.failed_pulls_total == {"absent": 9}
    assert facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0))


@pytest.mark.parametrize("family", ["deepseek", "hybrid"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_many_at_once_with_too_little_memory(family: str, shape: str) -> None:
    """Requests are preempted on the decode node, pages that came are pushed out, leases are short of blocks: the texts are the same."""
    model, asked = tiny_model(family), {f"{i}": [*PROMPT[: 20 + 2 * i], *((i + j) % VOCAB for j in range(9))] for i in range(8)}
    prefill, decode = node("prefill", model, shape, host=1 << 17), node("decode", model, shape, host=1 << 16, pages=26)
    alone = node("null", model, shape)
    # Two whose prompts are computed here do not fit together, however late the others' pages come.
    here = {name: [*PROMPT[:30], i] for i, name in enumerate(("here", "here, too"))}
    for engine in (decode, alone):
        for seed, (name, prompt) in enumerate(here.items()):
            ask(engine, name, prompt, temperature=0.8, seed=seed, max_tokens=40)
    for name, prompt in asked.items():
        ask(prefill, name, prompt, kv_offer_id=name, max_tokens=1)
        ask(alone, name, prompt, temperature=0.8, seed=int(name))
    offers = {name: events[-1].offer for name, events in drain(prefill).items()}
    for name, prompt in asked.items():
        offer = offers[name]
        assert offer is not None
        ask(decode, name, prompt, source=source(offer), temperature=0.8, seed=int(name))
    seen, wanted = drain(decode), drain(alone)
    assert {name: [t for e in seen[name] for t in e.tokens] for name in [*here, *asked]} == {
        name: [t for e in wanted[name] for t in e.tokens] for name in [*here, *asked]
    }
    assert decode.stats.preemptions_total > 0 and decode.stats.transfers_total["pull"] > 0 and free_blocks(decode)
