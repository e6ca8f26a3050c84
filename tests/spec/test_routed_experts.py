"""The experts that a request gets back are those that transformers' routers choose for the same tokens, whatever was drafted, shared,
preempted or captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SamplingConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError, InvalidRequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup import build, planning
from mtpserve.engine.startup.build import build_engine
from mtpserve.llm import LLM
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.text.experts import TokenExperts
from tests import selection
from tests.models.checkpoints import Tiny, deepseek, llama, qwen3_moe
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.hybrids import nemotron_h
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import gpt_oss, mimo_v2
from tests.models.sparse_checkpoints import glm_dsa
from tests.runtime.recorders import Again, runner_of
from tests.text.tiny import VOCAB, write

MTP = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_adaptive=False)
SHAPES = {
    "plain": SpecConfig(speculative_algorithm="none"),
    "chain": MTP,
    "tree": replace(MTP, speculative_eagle_topk=3, speculative_num_draft_tokens=9),
    "n-gram": SpecConfig(speculative_algorithm="NGRAM", speculative_adaptive=False),
}
Make = Callable[..., Tiny]
Texts = dict[str, tuple[list[int], TokenExperts]]
PROMPTS = [[3, 7, 5, 3, 7, 5, 3, 7, 5, 9], [4, 8, 4, 8, 4, 8, 4], [11, 2, 19], [3, 7, 5, 3, 7, 5, 3, 7, 5, 9, 8]]


def engine_of(tiny: Tiny, spec: SpecConfig, *, tokens: int = 1200, backend: str = "auto", **options: Any) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(tiny.directory), device="cpu", dtype="float32", attention_backend=backend),
            cache=CacheConfig(**{"page_size": 4, "max_total_tokens": tokens} | options),
            spec=spec,
            sampling=SamplingConfig(enable_return_routed_experts=True),
            scheduler=SchedulerConfig(max_running_requests=8, chunked_prefill_size=64, schedule_conservativeness=0.0),
        ),
        poison=True,
    )


def chosen(tiny: Tiny, ids: list[int]) -> dict[int, Tensor]:
    """By the trunk's layers with experts, what transformers' routers give for each token [T, top_k]."""
    found: dict[int, Tensor] = {}

    def hook(layer: int) -> Callable[..., None]:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            found[layer] = (output[-1] if isinstance(output, tuple) else tiny_topk(module, output)).reshape(len(ids), -1)

        return keep

    def tiny_topk(gate: Any, logits: Tensor) -> Tensor:
        scores = logits.reshape(len(ids), -1).sigmoid() + gate.e_score_correction_bias
        return scores.topk(tiny.config["num_experts_per_tok"], -1).indices

    hooks = [
        layer.mlp.gate.register_forward_hook(hook(number))
        for number, layer in enumerate(tiny.trunk.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        tiny.trunk(torch.tensor([ids]))
    for one in hooks:
        one.remove()
    return found


def texts(engine: Engine, round: int, wants: bool = True) -> Texts:
    """All prompts together, some greedy and some not → tokens, and the experts of all but the last."""
    tokens: dict[str, list[int]] = {}
    experts: dict[str, TokenExperts] = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=18, temperature=number % 2, seed=number, ignore_eos=True, return_routed_experts=wants and number != 2
        )
        engine.add(Request(f"{round} {number}", prompt, params))
        tokens[f"{round} {number}"], experts[f"{round} {number}"] = [], TokenExperts()
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[event.id] += event.tokens
            experts[event.id].add(event.routed_experts)
    engine.check_integrity()
    return {id: (tokens[id], experts[id]) for id in tokens}


def array_of(engine: Engine, experts: TokenExperts, num_tokens: int) -> Any:
    """[tokens, layers, experts], sorted: kernels list the same experts in different orders."""
    assert engine.card.experts is not None
    layers, top_k, itemsize = engine.card.experts
    assert itemsize == 1
    rows = np.frombuffer(experts.numbers(num_tokens), np.uint8).reshape(num_tokens - 1, layers, top_k)
    return np.sort(rows, -1)


def check(tiny: Tiny, engine: Engine, found: Texts) -> None:
    for id, (tokens, rows) in found.items():
        number = int(id.partition(" ")[2])
        if number == 2:
            assert not rows.rows, "it has not asked for them"
            continue
        ids = PROMPTS[number] + tokens
        experts, wanted = array_of(engine, rows, len(ids)), chosen(tiny, ids)
        assert len(wanted) > 0 and experts.shape[1:] == (tiny.config["num_hidden_layers"], tiny.config["num_experts_per_tok"])
        for layer in range(experts.shape[1]):
            if layer in wanted:
                assert (experts[:, layer] == np.sort(wanted[layer][:-1].numpy(), -1)).all(), (id, layer)
            else:
                assert not experts[:, layer].any()


@pytest.mark.parametrize(("make", "shape"), [*((deepseek, shape) for shape in SHAPES), (qwen3_moe, "plain"), (qwen3_moe, "n-gram")])
def test_they_are_transformers(tmp_path: Path, make: Make, shape: str) -> None:
    """Prompts find pages of others, in the second round all of them; and few pages preempt."""
    tiny = make(tmp_path)
    for tokens in (1200, 92 if shape != "tree" else 140):
        engine = engine_of(tiny, SHAPES[shape], tokens=tokens)
        for round in range(2):
            check(tiny, engine, texts(engine, round))
        stats = engine.stats
        assert (stats.preemptions_total > 0) == (tokens != 1200) and stats.cached_prompt_tokens_total > 0
        assert shape == "plain" or 0 < stats.accepted_tokens_total < stats.draft_tokens_total


@pytest.mark.parametrize("shape", ["plain", "chain", "tree"] if selection.ALL else ["chain", "tree"])
def test_captured_steps(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, recorder = deepseek(tmp_path, max_position_embeddings=512), Again()  # room for the rows that pad prompts
    monkeypatch.setattr(build, "make_graphs", lambda config, step, sampling, running: StepGraphs(step, sampling, recorder, running))
    engine = engine_of(tiny, SHAPES[shape], backend="reference")
    for round in range(2):
        check(tiny, engine, texts(engine, round))
    assert recorder.replayed


FAMILIES: dict[str, tuple[Make, SpecConfig]] = {
    "windows, sinks": (gpt_oss, SHAPES["n-gram"]),
    "recurrent layers": (nemotron_h, MTP),
    "a module for each depth": (mimo_v2, MTP),
    "experts by token, compressed attention": (deepseek_v4, MTP),
    "selected tokens": (glm_dsa, SHAPES["tree"]),
    "experts that compute nothing, beside a block": (longcat, MTP),
    "groups of experts": (ling, MTP),
}


@pytest.mark.parametrize("name", FAMILIES if selection.ALL else [*FAMILIES][:4:3])
def test_other_families_choose_as_for_a_prompt(tmp_path: Path, name: str) -> None:
    """What a text's tokens had while it was drafted is what they have in a prompt."""
    make, spec = FAMILIES[name]
    tiny = make(tmp_path)
    page = 8 if make is deepseek_v4 else 4
    found = texts(engine_of(tiny, spec, page_size=page, tokens=2400), 0)
    engine = engine_of(tiny, SHAPES["plain"], page_size=page, tokens=2400, disable_radix_cache=True)
    for id, (tokens, rows) in found.items():
        if rows.rows:
            prompt, again = [*PROMPTS[int(id.partition(" ")[2])], *tokens], TokenExperts()
            engine.add(Request("again", prompt, SamplingParams(max_tokens=1, temperature=0, return_routed_experts=True)))
            while engine.has_work:
                for event in engine.step():
                    again.add(event.routed_experts)
            experts = array_of(engine, rows, len(prompt))
            assert experts.any() and (array_of(engine, again, len(prompt) + 1)[:-1] == experts).all()


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_steps_in_flight(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows bounds of where a span starts, and of its drafts."""
    for module in (build, planning):
        monkeypatch.setattr(module, "overlap_of", lambda config, device: 1)
    tiny = deepseek(tmp_path)
    engine = engine_of(tiny, SHAPES[shape])
    for round in range(2):
        check(tiny, engine, texts(engine, round))


def test_pages_of_lower_tiers(tmp_path: Path) -> None:
    """A page brings its tokens' experts back from host memory."""
    tiny = deepseek(tmp_path)
    engine = engine_of(tiny, MTP, tokens=92, kv_offload_gib=0.01)
    for round in range(3):
        check(tiny, engine, texts(engine, round))
    assert engine.stats.loaded_pages["host"] > 0


def test_the_offline_engine_gives_them(tmp_path: Path) -> None:
    tiny = deepseek(write(tmp_path), vocab_size=VOCAB)
    options = {"device": "cpu", "dtype": "float32", "page_size": 4, "max_total_tokens": 600, "speculative_num_steps": 2}
    with LLM(str(tmp_path), enable_return_routed_experts=True, **options) as llm:
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, return_routed_experts=True)
        first, none = llm.generate(PROMPTS[:2], [params, replace(params, return_routed_experts=False)])
    wanted, experts = chosen(tiny, PROMPTS[0] + first.tokens), first.routed_experts
    assert none.routed_experts is None and experts is not None and experts.shape == (10 + 9 - 1, 3, 3)
    for layer in wanted:
        assert (np.sort(experts[:, layer], -1) == np.sort(wanted[layer][:-1].numpy(), -1)).all()
    with LLM(str(tmp_path), **options) as llm, pytest.raises(InvalidRequest, match="false without --enable-return-routed-experts"):
        llm.generate(PROMPTS[:1], params)


def test_nothing_is_read_where_nobody_asks(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path)
    engine = engine_of(tiny, MTP)
    runner = runner_of(engine)
    assert runner.step.routed is not None and runner.step.routed.rows([]) is None
    assert not any(rows.rows for _, rows in texts(engine, 0, wants=False).values())


def test_a_model_without_experts_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-return-routed-experts needs a model with experts, got the family llama"):
        engine_of(llama(tmp_path), SHAPES["plain"])
