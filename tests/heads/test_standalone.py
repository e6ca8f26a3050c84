"""A whole model drafts for another one with the same vocabulary: what it would say alone, and the text is the target's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError, UnsupportedModel
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import lookahead_of, plan
from mtpserve.engine.startup.start import try_out
from mtpserve.heads.standalone import StandaloneModel
from mtpserve.tools.prove.proof import prove
from mtpserve.weights.checkpoint.hub import fetched
from tests import selection
from tests.models.checkpoints import Tiny, deepseek, llama, mimo, mistral
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.hybrids import nemotron_h, qwen3_next
from tests.models.own_layouts import gpt_oss
from tests.models.sparse_checkpoints import deepseek_v32
from tests.proof.test_every_family import PROMPTS, write_tokenizer
from tests.weights.gguf_files import as_gguf

Make = Callable[..., Any]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
PAIRS: dict[str, tuple[Make, Make, dict[str, Any]]] = {
    "llama for MLA": (deepseek, llama, {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "windows for gqa": (llama, mistral, {"num_hidden_layers": 2, "sliding_window": 9}),
    "sinks and windows for gqa": (llama, gpt_oss, {"vocab_size": 24}),
    "MLA for MiMo": (mimo, deepseek, {"num_hidden_layers": 2, "n_routed_experts": 4}),
    "sparse MLA for a llama": (llama, deepseek_v32, {"num_hidden_layers": 1, "first_k_dense_replace": 1}),
}


def drafted(path: Path | str, steps: int = 3, **options: Any) -> SpecConfig:
    return SpecConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(path), speculative_num_steps=steps,
                      speculative_adaptive=False, **options)  # fmt: skip


def config_of(directory: Path | str, spec: SpecConfig, tokens: int = 400, **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(**{"model": str(directory), "device": "cpu", "dtype": "float32"} | model),
        cache=CacheConfig(page_size=4, max_total_tokens=tokens),
        spec=spec,
        scheduler=SchedulerConfig(chunked_prefill_size=19, max_running_requests=4, schedule_conservativeness=0.0),
    )


def texts(engine: Engine, start: str = "") -> list[list[int]]:
    """What it says to all prompts at once."""
    for i, prompt in enumerate(prompts()):
        engine.add(Request(f"{start}{i}", prompt, GREEDY))
    found: dict[str, list[int]] = {f"{start}{i}": [] for i in range(len(prompts()))}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            found[event.id] += event.tokens
    return list(found.values())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(24, (7 + 6 * i,), generator=generator).tolist() for i in range(5)]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Tiny]:
    target, drafter, options = PAIRS[request.param]
    made = tmp_path_factory.mktemp("pair")
    return target(made / "target"), drafter(made / "drafter", **options)


def test_greedy_text_is_the_targets(pair: tuple[Tiny, Tiny], request: pytest.FixtureRequest) -> None:
    """Also of requests that lose their pages and begin again, and of those that find their prompt in the cache."""
    target, drafter = (tiny.directory for tiny in pair)
    plain = texts(build_engine(config_of(target, SpecConfig(speculative_algorithm="none"))))
    tree = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
    shapes: tuple[tuple[int, dict[str, Any]], ...] = ((0, {}), (1, {}), (3, {}), (3, tree))
    whole = selection.ALL or request.node.callspec.params["pair"] == next(iter(PAIRS))
    for steps, shape in shapes if whole else shapes[2:]:
        engine = build_engine(config_of(target, drafted(drafter, steps, **shape), tokens=120), poison=True)
        for again in ("first", "again"):
            assert texts(engine, again) == plain, (steps, shape)
        assert engine.stats.preemptions_total > 0
        assert (engine.stats.draft_tokens_total > 40) == (steps > 0)


def test_drafts_come_from_the_numbers_that_it_gives_alone(pair: tuple[Tiny, Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each draft the logits, from the text so far and the drafts before it, computed from scratch: after chunks, and after the cache."""
    target, drafter = pair
    heard: list[Tensor] = []
    logits = StandaloneModel.logits

    def hear(self: StandaloneModel, head: Tensor, depth: int) -> Tensor:
        heard.append(logits(self, head, depth))
        return heard[-1]

    monkeypatch.setattr(StandaloneModel, "logits", hear)
    engine, compared = build_engine(config_of(target.directory, drafted(drafter.directory)), poison=True), 0
    for again in ("first", "again"):
        engine.add(Request(again, prompts()[-1], GREEDY))
        text, given = prompts()[-1], list[Tensor]()
        while engine.has_work:
            heard.clear()
            for event in engine.step():
                for i, step in enumerate(given[: len(event.proposal.tokens)]):
                    alone = drafter.logits([*text, *event.proposal.tokens[:i]])[-1]
                    torch.testing.assert_close(step[0], alone, atol=1e-4, rtol=1e-4)
                    compared += 1
                text, given = [*text, *event.tokens], list(heard)
    assert compared > 40


def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path) -> None:
    llama(tmp_path)
    engine = build_engine(config_of(tmp_path, drafted(tmp_path)))
    texts(engine)
    assert engine.stats.accepted_tokens_total == engine.stats.draft_tokens_total > 40


def test_traces_counters_and_the_log_call_it_by_its_algorithm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llama(tmp_path)
    engine = build_engine(config_of(tmp_path, drafted(tmp_path)))
    with caplog.at_level("INFO"):
        try_out(engine)
    assert engine.card.algorithm == "STANDALONE" and "standalone self-test: " in caplog.text
    engine.add(Request("a", prompts()[0], GREEDY))
    events = [event for _ in range(3) for event in engine.step()]
    assert {source for event in events for source in event.proposal.sources} == {"standalone"}
    stats = engine.stats
    assert list(stats.draft_tokens_by_source) == ["standalone", "ngram", "prediction", "grammar"]
    assert stats.draft_tokens_by_source["standalone"] == stats.accepted_tokens_by_source["standalone"] == stats.draft_tokens_total == 6


@pytest.mark.parametrize("rounding", ["none", "int8"])
def test_its_memory_has_a_row_of_its_own(tmp_path: Path, rounding: str) -> None:
    """On a CPU its matrices may be rounded, and the text is the target's as before."""
    drafter = llama(tmp_path / "drafter", num_hidden_layers=2)
    target = llama(tmp_path / "target").directory
    config = config_of(target, drafted(drafter.directory, speculative_draft_model_quantization=rounding))
    ahead, each = lookahead_of(config, torch.device("cpu")), 4 * 2 * 12  # positions after the longest text; a sine and a cosine
    matrices = sum(tensor.numel() for name, tensor in drafter.tensors.items() if name.endswith(("proj.weight", "head.weight")))
    others = sum(tensor.numel() for tensor in drafter.tensors.values()) - matrices
    rows = dict(plan(config).memory.rows)
    expected = each * (64 + ahead) + 4 * others + (1 if rounding == "int8" else 4) * matrices
    assert rows["weights, draft model (llama, 2 layers of 48)"] == expected
    engine = build_engine(config)
    assert (
        texts(engine) == texts(build_engine(config_of(target, SpecConfig(speculative_algorithm="none"))))
        and engine.stats.draft_tokens_total > 40
    )


@pytest.mark.parametrize("make", [nemotron_h, qwen3_next, deepseek_v4])
def test_who_keeps_more_than_keys_and_values_is_refused(tmp_path: Path, make: Make) -> None:
    llama(tmp_path / "target", vocab_size=make(tmp_path / "drafter").config["vocab_size"])
    with pytest.raises(UnsupportedModel, match=r"drafter/config.json: a \w+ model cannot draft for another one: .*no states"):
        plan(config_of(tmp_path / "target", drafted(tmp_path / "drafter")))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Where no tokenizer tells that the difference is padding, or it tells that it is not."""
    for name, vocab in (("target", 24), ("drafter", 25)):
        llama(tmp_path / name, vocab_size=vocab)
    config = config_of(tmp_path / "target", drafted(tmp_path / "drafter"))
    with pytest.raises(ConfigError, match=r"drafter: vocab_size is 25, and the model's is 24; this may be padding, .*no tokenizer.json"):
        plan(config)
    for name in ("target", "drafter"):
        write_tokenizer(tmp_path / name)
    with pytest.raises(ConfigError, match="must have the same tokenizer as the model: token 24 is '' to the model and 'y' to"):
        plan(config)


@pytest.mark.parametrize(("vocab", "drafter"), [(24, 30), (30, 24)])
def test_paddings_of_one_vocabulary_may_differ(tmp_path: Path, vocab: int, drafter: int) -> None:
    """The text is the target's, which speaks of padding, too, since it is random; what both know is drafted."""
    for name, size in (("target", vocab), ("drafter", drafter)):
        llama(tmp_path / name, vocab_size=24)
        write_tokenizer(tmp_path / name)
        llama(tmp_path / name, vocab_size=size)
    plain = texts(build_engine(config_of(tmp_path / "target", SpecConfig(speculative_algorithm="none"))))
    for options in ({}, {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}):
        engine = build_engine(config_of(tmp_path / "target", drafted(tmp_path / "drafter", **options)), poison=True)
        assert texts(engine) == plain and engine.stats.draft_tokens_total > 40
    assert (max(map(max, plain)) > 23) == (vocab == 30)
    proof = prove(
        {"model": str(tmp_path / "target"), "dtype": "float32", "max_total_tokens": 2048, "random_seed": 1,
         "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(tmp_path / "drafter")},
        PROMPTS, tokens=16, draws=60 if selection.ALL else 16,
    )  # fmt: skip
    assert proof.holds, (proof.divergences, proof.laws)


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        llama(tmp_path / name)
        write_tokenizer(tmp_path / name)
    config = config_of(tmp_path / "target", drafted(tmp_path / "drafter"))
    plan(config)
    file = tmp_path / "drafter" / "tokenizer.json"
    file.write_text(file.read_text().replace('"f"', '"F"').replace('"p"', '"P"'))
    with pytest.raises(ConfigError, match=r"must have the same tokenizer as the model: token 5 is 'f' to the model and 'F' to .*drafter"):
        plan(config)


def test_a_drafter_for_shorter_texts_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llama(tmp_path / "target"), llama(tmp_path / "drafter", max_position_embeddings=32)
    plan(config_of(tmp_path / "target", drafted(tmp_path / "drafter"), context_length=32))
    assert "positions" not in caplog.text
    plan(config_of(tmp_path / "target", drafted(tmp_path / "drafter")))
    assert "drafter/config.json: the draft model has 32 positions and requests may have 64 tokens" in caplog.text


def test_dummy_weights(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        llama(tmp_path / name)
        for file in (tmp_path / name).glob("*.safetensors*"):
            file.unlink()
    engine = build_engine(config_of(tmp_path / "target", drafted(tmp_path / "drafter"), load_format="dummy"))
    assert all(len(tokens) == 16 for tokens in texts(engine)) and engine.stats.draft_tokens_total > 40


def test_a_file_drafts_for_a_directory(tmp_path: Path) -> None:
    """The same model, so that every draft is right."""
    tiny, drafter = llama(tmp_path / "target"), tmp_path / "drafter" / "model.gguf"
    drafter.parent.mkdir()
    write_tokenizer(tiny.directory)
    (tiny.directory / "tokenizer_config.json").write_text('{"bos_token": "a", "eos_token": "b", "chat_template": ""}')
    as_gguf(tiny, drafter, tokenizer=tiny.directory)
    for name in (drafter, drafter.parent):
        engine = build_engine(fetched(config_of(tiny.directory, drafted(name))))
        texts(engine)
        assert engine.stats.accepted_tokens_total == engine.stats.draft_tokens_total > 40


def test_names_of_draft_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.weights.checkpoint.hub.directory_of", lambda name, *more: f"/hub/{name}")
    monkeypatch.setattr("mtpserve.weights.checkpoint.hub.gguf_file", lambda name: "/packages/smollm2.gguf" if name == "smollm2" else None)
    known = {
        "demo": str(ModelConfig(model="demo").directory),
        "smollm2": "/packages/smollm2.gguf",
        "a/b": "/hub/a/b",
        str(tmp_path): str(tmp_path),
    }
    for name, path in known.items():
        assert fetched(config_of(tmp_path, drafted(name)), download=False).spec.checkpoint == path


def test_the_proof_holds(tmp_path: Path) -> None:
    """Every sampling feature: grammars, penalties, seeds and the rest, in the same batches."""
    for name, make in (("target", deepseek), ("drafter", llama)):
        make(tmp_path / name)
        write_tokenizer(tmp_path / name)
    options: dict[str, Any] = {
        "model": str(tmp_path / "target"), "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 32, "random_seed": 1,
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(tmp_path / "drafter"), "speculative_num_steps": 3,
    }  # fmt: skip
    proof = prove(options, PROMPTS, tokens=24, draws=24)
    assert proof.holds, (proof.divergences, proof.laws)
    assert len(proof.laws) == 12 and min(proof.drafted[:3]) > 0


def test_the_demo_drafts_for_itself() -> None:
    """Then every draft is accepted, greedy and sampled: rejection sampling finds p = q."""
    options = {"model": "demo", "dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 32,
               "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "demo", "speculative_num_steps": 2}  # fmt: skip
    proof = prove(options, ["import os\n\ndef read_lines(path):"], tokens=24, draws=6)
    assert proof.holds, (proof.divergences, proof.laws)
    assert sum(proof.accepted) > 0.95 * sum(proof.drafted) > 100, (proof.accepted, proof.drafted)
