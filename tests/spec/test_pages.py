"""What lies in a page depends on the tokens up to its end, and on nothing else: pages can be shared, kept and sent by their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.config import SpecConfig
from mtpserve.core.request import Proposal, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from tests.runtime.recorders import Again
from tests.tiny import VOCAB, tiny_engine, tiny_model

PAGE = 4
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=3, speculative_num_draft_tokens=8)
FAMILIES = ["deepseek", "sparse", "mimo"]


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def pages_of(engine: Engine, name: str, count: int) -> list[Tensor]:
    """What the first `count` pages of a live request hold: keys and values of all layers, and the boundary rows."""
    step: Any = engine.runner.step  # type: ignore[attr-defined]
    pages = torch.tensor(engine._scheduler.live[name].cache.blocks[0].pages[:count])
    slots = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
    kept = [part[:, slots] for store in step.stores.stores for part in store.pool.parts]
    return [*kept, step.drafter.base.passes.boundary.rows[pages]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [3, TREE], ids=["chain", "tree"])
def test_a_page_does_not_know_what_follows_it(family: str, spec: int | SpecConfig) -> None:
    model, common = tiny_model(family), tokens(4 * PAGE)
    held = []
    for following in (1, 2):
        engine = tiny_engine(model, spec, page_size=PAGE)
        engine.add(Request("a", [*common, following], SamplingParams(max_tokens=30, temperature=0.0)))
        for _ in range(4):
            engine.step()
        held.append(pages_of(engine, "a", 4))
    for one, other in zip(*held, strict=True):
        # Slot 0 of the draft model's layer is never written: the pool is full of NaN.
        assert torch.equal(one.nan_to_num(nan=1e9), other.nan_to_num(nan=1e9)) and not one[0].isnan().any()


def spoken(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], dict[str, list[Proposal]]]:
    """Texts, and the drafts that were verified, by request."""
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    drafts: dict[str, list[Proposal]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            texts[event.id] += event.tokens
            if event.proposal.tokens:
                drafts[event.id].append(event.proposal)
        engine.check_integrity()
    assert engine.stats.pages_used == 0
    return texts, drafts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1, 4 * PAGE + 2])
@pytest.mark.parametrize("spec", [0, 3, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_with_one_prompt_share_its_whole_pages(family: str, length: int, spec: int | SpecConfig, temperature: float) -> None:
    model, prompt = tiny_model(family), tokens(length, seed=1)

    requests = [Request(str(i), prompt, SamplingParams(max_tokens=20, temperature=temperature, seed=i)) for i in range(3)]
    engine = tiny_engine(model, spec, page_size=PAGE)
    for request in requests:
        engine.add(request)
    while len(engine._scheduler.running) < 3:
        engine.step()
    first, *others = (engine._scheduler.live[str(i)].cache.blocks[0].pages for i in range(3))
    assert all(other[: length // PAGE] == first[: length // PAGE] for other in others), "all whole pages of the prompt"
    assert all(set(other[length // PAGE :]).isdisjoint(first) for other in others)
    # Neither the texts nor what was drafted depends on who computed the prompt.
    alone, shared = (spoken(tiny_engine(model, spec, page_size=PAGE, fingerprint=each), requests) for each in (None, b""))
    assert shared == alone


@pytest.mark.parametrize("length", [4 * PAGE, 4 * PAGE + 1])
def test_a_first_row_after_shared_pages_is_not_replayed(length: int) -> None:
    """A single row of a prompt, as a decoding step has it: but a captured step neither computes the draft model's row before it nor leaves
    a row unstored."""
    model, prompt = tiny_model(), tokens(length, seed=1)
    requests = [Request(str(i), prompt, SamplingParams(max_tokens=20, temperature=0.0)) for i in range(3)]
    recorder = Again()
    shared = spoken(tiny_engine(model, 3, page_size=PAGE, recorder=recorder), requests)
    assert shared == spoken(tiny_engine(model, 3, page_size=PAGE, fingerprint=None), requests) and recorder.replayed


@pytest.mark.parametrize("spec", [3, TREE], ids=["chain", "tree"])
def test_a_shared_page_is_read_and_never_written(spec: int | SpecConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last token of the prompt, which each request computes for itself, is the last of a page. With other numbers than the
    first time: a model that is not quite deterministic shows every write."""
    model, prompt = tiny_model(), tokens(4 * PAGE, seed=2)
    engine = tiny_engine(model, spec, page_size=PAGE)
    engine.add(Request("0", prompt, SamplingParams(max_tokens=40, temperature=0.0)))
    engine.step()
    before = [part.clone() for part in pages_of(engine, "0", 4)]
    embed = model.embed.forward
    monkeypatch.setattr(model.embed, "forward", lambda ids: 1.01 * embed(ids))
    for i in (1, 2):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=20, temperature=0.9, seed=i)))
    for _ in range(5):
        engine.step()
    assert len(engine._scheduler.running) == 3
    for one, other in zip(before, pages_of(engine, "0", 4), strict=True):
        assert torch.equal(one.nan_to_num(nan=1e9), other.nan_to_num(nan=1e9))
