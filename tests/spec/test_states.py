"""Recurrent layers: states are those of plain decoding, whoever shares them, and wherever they were meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.build import available

from mtpserve.cache.keys import extend, root
from mtpserve.config import CacheConfig
from mtpserve.core.arch.model import Recurrent
from mtpserve.core.request import Finish, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.runtime.memory import state_sizes
from tests.runtime.recorders import Again
from tests.spec.diagonal import diagonal
from tests.spec.test_prefix_cache import PAGE, SHAPES, SYSTEM, conversation, said, spoken
from tests.spec.test_tiers import engine_with, histories, talk
from tests.tiny import VOCAB, prompts, run, tiny_arch, tiny_engine, tiny_model

BACKENDS = ["reference", *(["cpu"] if available() else [])]  # without a compiler, too
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def model_for(backend: str = BACKENDS[-1], family: str = "hybrid") -> Any:
    return tiny_model(family, kernels="cpu" if backend == "cpu" else "torch", layers=4 if family == "hybrid" else 2)


MODELS = {f"{backend}-hybrid": (backend, "hybrid") for backend in BACKENDS} | {f"{BACKENDS[-1]}-mamba2": (BACKENDS[-1], "mamba2")}


@pytest.mark.parametrize(("kind", "shape"), diagonal(MODELS, ["chain", "tree", "plain"]))
def test_everything_at_once(kind: tuple[str, str], shape: str) -> None:
    """Prompt chunks, preemption and cached prefixes: each text is that of the request alone, decoded plainly without any of them."""
    backend, family = kind
    model, asked = model_for(backend, family), prompts(6, longest=40)
    alone = [run(tiny_engine(model, 0, backend=backend, fingerprint=None), [prompt], GREEDY)[0] for prompt in asked]
    engine = tiny_engine(model, SHAPES[shape], backend=backend, pages=36, page_size=PAGE, budget=14, states=6)
    assert run(engine, asked, GREEDY) == alone
    # Other requests branch off within the prompts, and go on after them.
    assert engine.stats.preemptions_total > 0 and run(engine, asked, GREEDY) == alone
    more = [[*prompt, 1, 2, 3] for prompt in asked]
    assert run(engine, more, GREEDY) == [run(tiny_engine(model, 0, backend=backend, fingerprint=None), [ids], GREEDY)[0] for ids in more]
    assert engine.stats.cached_prompt_tokens_total > 0


def test_a_state_is_kept_where_requests_branch() -> None:
    engine = tiny_engine(model_for("reference"), 3, page_size=PAGE)
    found = []
    for who in range(4):
        events = said(engine, str(who), [*SYSTEM, *((7 * who + i) % VOCAB for i in range(9))], temperature=0.0)
        found.append(sum(event.num_cached_tokens for event in events))
    # The second finds pages and no state: it keeps one where it leaves the first. From then on all start there.
    assert found == [0, 0, *[len(SYSTEM) // PAGE * PAGE] * 2]


@cache
def turns_alone() -> list[list[int]]:
    """What is said in three turns, decoded plainly without a cache."""
    seen, found = conversation(tiny_engine(model_for("reference"), 0, fingerprint=None), 3, temperature=0.0)
    assert found == [0] * 3
    return words(seen)


def words(turns: list[list[Any]]) -> list[list[int]]:
    return [[token for tokens, *_ in turn for token in tokens] for turn in turns]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((shape, {"overlap": late}) for shape in SHAPES for late in (0, 1)),
        ("chain", {"overlap": 2, "recorder": Again(), "seats": 2}),
        ("tree", {"exact": True}),
    ],
)
def test_the_next_turn_finds_prompt_and_answer(shape: str, options: dict[str, Any]) -> None:
    engine, page = tiny_engine(model_for("reference"), SHAPES[shape], page_size=8, **options), 8
    seen, found = conversation(engine, 3, temperature=0.0)
    assert words(seen) == turns_alone() and found[0] == 0
    # Drafts that the last step accepted are not in the state yet.
    waiting = 0 if shape == "plain" else 3
    for number, text in zip(found[1:], (len(SYSTEM) + 21 * turn for turn in (1, 2)), strict=True):
        assert (text - 1 - waiting) // page * page <= number <= (text - 1) // page * page


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_an_answer_may_end_anywhere_in_an_accepted_run(overlap: int) -> None:
    """Drafts are the client's prediction, which is right: each step passes some tokens, of which the state has those of the step before."""
    model, page, params = model_for(), 16, SamplingParams(max_tokens=60, temperature=0)
    text = run(tiny_engine(model, 0, fingerprint=None), [SYSTEM], params)[0]
    engine = tiny_engine(model, 3, page_size=page, overlap=overlap, states=96)
    cut = {str(n): n for n in range(4, 36)}
    answers, _ = served(engine, [Request(name, SYSTEM, params, prediction=text, salt=name) for name in cut], cut)
    assert all(tokens == text[: len(tokens)] for tokens in answers.values()) and engine.stats.accepted_tokens_total > 250
    few = SamplingParams(max_tokens=3, temperature=0)
    again, found = served(engine, [Request(name, [*SYSTEM, *text[: len(answers[name]) + 1]], few, salt=name) for name in cut])
    for name, tokens in answers.items():
        length = len(SYSTEM) + len(tokens)
        assert again[name] == text[len(tokens) + 1 :][:3]
        assert (length - 1 - 11) // page * page <= found[name] <= (length - 1) // page * page


def served(engine: Engine, requests: Iterable[Request], cut: dict[str, int] | None = None) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Each one's tokens, and the prompt tokens that it found. `cut`: after how many tokens its client leaves."""
    for request in requests:
        engine.add(request)
    tokens, found = defaultdict[str, list[int]](list), defaultdict[str, int](int)
    while engine.has_work:
        for event in engine.step():
            tokens[event.id] += event.tokens
            found[event.id] += event.num_cached_tokens
            if cut is not None and len(tokens[event.id]) >= cut[event.id]:
                engine.abort(event.id)
        engine.check_integrity()
    return dict(tokens), found


def test_without_room_for_states_nothing_is_found_and_nothing_is_wrong() -> None:
    model, asked = model_for(), prompts(5, longest=30)
    engine = tiny_engine(model, 3, states=0)
    first = run(engine, asked, GREEDY)
    assert run(engine, asked, GREEDY) == first and engine.stats.cached_prompt_tokens_total == 0


@pytest.mark.parametrize(("shape", "backend"), diagonal(["tree", "chain", "plain"], BACKENDS))
def test_states_come_back_from_host_memory(shape: str, backend: str) -> None:
    model = model_for(backend)
    small = engine_with(shape, "hybrid", CacheConfig(kv_offload_gib=0.01), pages=32, model=model, backend=backend, states=4)
    assert talk(small) == talk(engine_with(shape, "hybrid", None, model=model, backend=backend, states=64))
    assert small.stats.loaded_pages["host"] > 20 and not small.stats.failed_transfers_total
    assert small.stats.cached_prompt_tokens_total > 0.3 * small.stats.prompt_tokens_total


def test_another_engine_finds_states_on_disk(tmp_path: Path) -> None:
    tiers, model = CacheConfig(kv_offload_dir=str(tmp_path)), model_for()
    first = talk(engine_with("chain", "hybrid", tiers, model=model, states=16), turns=1)
    second = engine_with("chain", "hybrid", tiers, model=model, states=16)
    assert talk(second, turns=1) == first
    found = sum((len(text) - 1) // PAGE * PAGE for text in histories())
    assert second.stats.loaded_pages["disk"] > 0 and second.stats.cached_prompt_tokens_total >= 0.9 * found


def test_states_of_a_request_that_failed_are_not_found() -> None:
    engine = tiny_engine(model_for("reference"), 3, page_size=PAGE)
    prompt = [*SYSTEM, 1, 2, 3]
    said(engine, "good", prompt, temperature=0.0)
    group = engine._pages.groups[engine._pages.dense].allocator
    keys: list[bytes] = []
    extend(keys, root(b"", ""), prompt, len(prompt), PAGE)
    assert any(group.find(key) is not None for key in keys)
    engine.add(Request("bad", [*prompt, 5], SamplingParams(max_tokens=8, temperature=0)))
    engine.step()
    with torch.no_grad():
        engine.runner.step.model.norm.weight.fill_(torch.nan)  # type: ignore[attr-defined]
    finishes = [event.finish for _ in range(4) for event in engine.step()]
    assert Finish.ERROR in finishes
    assert not any(group.find(key) is not None for key in keys)


def test_what_waits_is_small() -> None:
    """Of Qwen3.5-9B's 24 recurrent layers in bfloat16 with three drafts: one state and a ring are at most 1.1 states."""
    layer = Recurrent(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
    arch = tiny_arch("hybrid")
    state, waiting = state_sizes(type(arch)(**{**vars_of(arch), "layers": (layer,) * 24}), itemsize=2, ring=3)
    assert state == 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192) and waiting < 0.1 * state


def vars_of(arch: Any) -> dict[str, Any]:
    return {name: getattr(arch, name) for name in arch.__slots__}


def test_texts_that_are_drawn_do_not_depend_on_company() -> None:
    model, asked = model_for(), prompts(6, longest=30)
    params = [SamplingParams(max_tokens=20, temperature=0.8, seed=i) for i in range(len(asked))]
    alone = [run(tiny_engine(model, 3), [ids], one)[0] for ids, one in zip(asked, params, strict=True)]
    assert run(tiny_engine(model, 3, pages=40, budget=14), asked, params) == alone
    assert spoken(said(tiny_engine(model, 3), "0", asked[0], temperature=0.8, seed=0))[:18] == alone[0][:18]
