"""Gemma 4's assistants draft from the keys and values of the model: what transformers computes, and the text is the model's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.config import SpecConfig
from mtpserve.core.arch.model import attention_kinds
from mtpserve.core.errors import ConfigError, MTPServeError
from mtpserve.core.protocols.parallel import ALONE
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.assemble import assemble
from mtpserve.engine.startup.build import build_engine, load_part, options_of, sizes_of
from mtpserve.engine.startup.planning import plan
from mtpserve.heads.assistant import AssistantModel
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.tools.prove.proof import prove
from tests.heads.test_standalone import GREEDY, config_of, prompts, texts
from tests.models.checkpoints import llama
from tests.models.gemmas import SMALL, Pair, assistant, gemma4, successor
from tests.proof.test_every_family import DRAWS, PROMPTS, write_tokenizer
from tests.runtime.recorders import Again
from tests.tiny import prompts as tiny_prompts, run


def drafted(path: Path | str, steps: int = 3, algorithm: str = "FROZEN_KV_MTP", **options: Any) -> SpecConfig:
    return SpecConfig(speculative_algorithm=algorithm, speculative_draft_model_path=str(path), speculative_num_steps=steps,
                      speculative_adaptive=False, **options)  # fmt: skip


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "large": ({}, {}),
    "small, clusters": (SMALL, {"clusters": True, "num_hidden_layers": 4, "layer_types": None}),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    trunk, options = PAIRS[request.param]
    made = tmp_path_factory.mktemp("pair")
    return assistant(made / "assistant", gemma4(made / "target", **trunk), **options)


def test_drafts_come_from_transformers_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each draft the logits, from the text so far and the drafts before it, computed from scratch: after chunks, and after the cache."""
    heard: list[Tensor] = []
    logits = AssistantModel.logits

    def hear(self: AssistantModel, head: Tensor, depth: int) -> Tensor:
        heard.append(logits(self, head, depth))
        return heard[-1]

    monkeypatch.setattr(AssistantModel, "logits", hear)
    engine, compared = build_engine(config_of(pair.trunk.directory, drafted(pair.directory)), poison=True), 0
    for again in ("first", "again"):
        engine.add(Request(again, prompts()[-1], GREEDY))
        text, given = prompts()[-1], list[Tensor]()
        while engine.has_work:
            heard.clear()
            for event in engine.step():
                proposed = event.proposal.tokens
                alone = pair.draft_logits(text, list(proposed[:-1])) if proposed else []
                for ours, theirs in zip(given[: len(proposed)], alone, strict=True):
                    seen = ours[0].isfinite()
                    torch.testing.assert_close(ours[0][seen], theirs[seen], atol=1e-3, rtol=1e-3)
                    compared += 1
                text, given = [*text, *event.tokens], list(heard)
    assert compared > 40


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_greedy_text_is_the_models(pair: Pair, steps: int) -> None:
    """Also of requests that lose their pages and begin again, and of those that find their prompt in the cache."""
    plain = texts(build_engine(config_of(pair.trunk.directory, SpecConfig(speculative_algorithm="none"))))
    tree = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
    for shape in ({}, tree) if steps == 3 else ({},):
        engine = build_engine(config_of(pair.trunk.directory, drafted(pair.directory, steps, **shape), tokens=92), poison=True)
        for again in ("first", "again"):
            assert texts(engine, again) == plain, shape
        assert engine.stats.draft_tokens_total > 40
        assert steps > 1 or engine.stats.preemptions_total > 0


@pytest.mark.parametrize("algorithm", ["FROZEN_KV_MTP", "NEXTN", "mtp", "gemma4_mtp", "EAGLE", "auto", "NEXTN+NGRAM"])
def test_an_assistant_that_is_right_is_always_accepted(tmp_path: Path, algorithm: str) -> None:
    pair = successor(tmp_path)
    engine = build_engine(config_of(pair.trunk.directory, drafted(pair.directory, 7, algorithm)), poison=True)
    found = texts(engine)
    for prompt, text in zip(prompts(), found, strict=True):
        wanted = [(prompt[-1] + 5 * (i + 1)) % 24 for i in range(len(text))]
        assert text == wanted
    assert engine.stats.accepted_tokens_total > 0.9 * engine.stats.draft_tokens_total > 30
    assert engine.stats.steps_total < len(found[0])


def test_the_clusters_of_the_right_token_are_proposed(tmp_path: Path) -> None:
    """Their centroids are random: some drafts are of other clusters, and the text is the same."""
    pair = successor(tmp_path, clusters=True)
    engine = build_engine(config_of(pair.trunk.directory, drafted(pair.directory)), poison=True)
    found = texts(engine)
    assert [text[0] for text in found] == [(prompt[-1] + 5) % 24 for prompt in prompts()]
    assert 0 < engine.stats.accepted_tokens_total < engine.stats.draft_tokens_total


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shape", [{}, {"speculative_eagle_topk": 2}], ids=["chain", "tree"])
def test_it_holds(pair: Pair, backend: str, shape: dict[str, Any]) -> None:
    """Greedy identity and the laws of sampled texts."""
    write_tokenizer(pair.trunk.directory)
    options = {
        "model": str(pair.trunk.directory), "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 32, "random_seed": 1,
        "speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_draft_model_path": str(pair.directory),
        "attention_backend": backend, **shape,
    }  # fmt: skip
    proof = prove(options, PROMPTS, tokens=16, draws=DRAWS)
    assert proof.holds, (proof.divergences, proof.laws)
    assert sum(proof.drafted) > 100


def test_it_has_no_pages_and_no_rows_of_its_own(pair: Pair) -> None:
    config = config_of(pair.trunk.directory, SpecConfig(speculative_algorithm="none"))
    alone, both = (
        plan(replace(config, spec=replace(spec, speculative_draft_model_quantization="none")))
        for spec in (config.spec, drafted(pair.directory))
    )
    stored = [[(name, size) for name, size in each.memory.rows if "hidden state" in name] for each in (alone, both)]
    assert stored == [[], []]
    assert attention_kinds(alone.described.arch.layers) == attention_kinds(both.described.arch.layers)
    assert "Gemma 4 assistant (" in both.described.arch.summary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone_hidden_size": 47}, "backbone_hidden_size is 47, and the model's is 48"),
        ({"head_dim": 10}, "head_dim is 10, and the model's is 12"),
        ({"vocab_size": 23}, "vocab_size is 23, and the model's is 24"),
        ({"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input = 4 is not supported; supported: none, in an assistant"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids must be a divisor of vocab_size = 24, got 7"),
        ({"use_ordered_embeddings": True, "num_centroids": 6}, "centroid_intermediate_top_k must be at most num_centroids = 6"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    pair = assistant(tmp_path / "assistant", gemma4(tmp_path / "target"))
    values = json.loads((pair.directory / "config.json").read_text())
    values["text_config"] |= change
    (pair.directory / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(MTPServeError, match=message):
        plan(config_of(pair.trunk.directory, drafted(pair.directory)))


def test_it_drafts_for_a_gemma_4_alone(tmp_path: Path) -> None:
    pair = assistant(tmp_path / "assistant", gemma4(tmp_path / "target"))
    with pytest.raises(ConfigError, match="an assistant reads the keys and values of a Gemma 4 model, and the model is a llama"):
        plan(config_of(llama(tmp_path / "llama").directory, drafted(pair.directory)))
    with pytest.raises(ConfigError, match="speculative-draft-model-path must be the draft model of FROZEN_KV_MTP"):
        SpecConfig(speculative_algorithm="FROZEN_KV_MTP")


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.thorough)])
def test_replayed_steps_give_the_same_texts(pair: Pair, backend: str) -> None:
    """A graph's replay is the step called again; with a step in flight, and with the kernels of a GPU in the interpreter."""
    planned = plan(config_of(pair.trunk.directory, drafted(pair.directory, 2), attention_backend="reference"))
    asked = [[token % 24 for token in prompt] for prompt in tiny_prompts(3, longest=9)]
    params = [SamplingParams(max_tokens=6, temperature=0.7 * (i % 2), seed=i, ignore_eos=True) for i in range(3)]

    def engine(**more: Any) -> Engine:
        model = load_part(planned, ALONE, False, None)
        return assemble(model, sizes_of(planned), replace(options_of(planned, [], None), poison=True, **more))

    recorder, wanted = Again(), run(engine(), asked, params)
    replayed = engine(backend=backend, overlap=1, graphs=lambda step, sampling: StepGraphs(step, sampling, recorder, 4))
    assert run(replayed, asked, params) == wanted
    assert len(recorder.replayed) > 3 and replayed.stats.draft_tokens_total > 10
