"""EAGLE's heads of every published layout: their drafts are those of a computation from scratch, and the text is the target's."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError, LoadError, UnsupportedModel
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import plan
from mtpserve.heads.eagle import EagleHead
from mtpserve.heads.eagle3 import Eagle3Head
from mtpserve.tools.prove.proof import prove
from tests.heads.eagles import TinyHead, eagle, eagle3
from tests.models.checkpoints import deepseek, llama, mimo, qwen3_moe, write, write_nextn
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.hybrids import qwen3_next
from tests.models.own_layouts import gpt_oss, minimax_m2
from tests.proof.test_every_family import PROMPTS, write_tokenizer
from tests.spec.diagonal import diagonal

Make = Callable[..., Any]
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
IDS = "eagle_aux_hidden_state_layer_ids"
# Algorithm, target, its options, the head and its options.
LAYOUTS: dict[str, tuple[str, Make, dict[str, Any], Make, dict[str, Any]]] = {
    "EAGLE": ("EAGLE", llama, {}, eagle, {}),
    "EAGLE of two layers without a bias, for MLA": ("EAGLE", deepseek, {}, eagle, {"layers": 2, "bias": False, "copies": False}),
    "the authors' EAGLE-3": ("EAGLE3", llama, {"num_hidden_layers": 7}, eagle3, {}),
    "SpecForge's, 3.1, another hidden size": (
        "EAGLE3", qwen3_moe, {}, eagle3,
        {"taps": (0, 1, 2), "eagle_config": {IDS: [0, 1, 2]}, "hidden": 32, "norms": "fc_norm", "norm_output": True, "embedding": True},
    ),
    "speculators', Qwen3's norms, a window": (
        "EAGLE", mimo, {}, eagle3,
        {"taps": (0, 2), IDS: [1, 3], "nested": True, "middle": False, "layers": 2, "head_norms": True, "norms": "norm_before_fc",
         "norm_before_residual": True, "window": 9, "embedding": True},
    ),
    "the model's head, biases": (
        "EAGLE3", gpt_oss, {}, eagle3,
        {"taps": (0, 1), IDS: [1, 2], "own_head": False, "drafts": None, "bias": True, "prefix": "model.", "attention_bias": True},
    ),
    "SpecForge's, for MiniMax-M2": (
        "EAGLE3", minimax_m2, {"num_hidden_layers": 7, "attn_type_list": [1] * 7}, eagle3,
        {"taps": (1, 3, 5), "eagle_config": {IDS: [1, 3, 5]}},
    ),
    "the last hidden state, beside recurrent layers": (
        "EAGLE3", qwen3_next, {}, eagle3, {"taps": (), "eagle_config": {"use_aux_hidden_state": False}, "drafts": None}
    ),
}  # fmt: skip


def drafted(path: Path, algorithm: str = "EAGLE3", steps: int = 3, **options: Any) -> SpecConfig:
    return SpecConfig(speculative_algorithm=algorithm, speculative_draft_model_path=str(path), speculative_num_steps=steps,
                      **{"speculative_adaptive": False} | options)  # fmt: skip


def config_of(directory: Path, spec: SpecConfig, tokens: int = 400, **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(**{"model": str(directory), "device": "cpu", "dtype": "float32"} | model),
        cache=CacheConfig(page_size=4, max_total_tokens=tokens),
        spec=spec,
        scheduler=SchedulerConfig(chunked_prefill_size=19, max_running_requests=4, schedule_conservativeness=0.0),
    )


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (5 + 6 * i,), generator=generator).tolist() for i in range(4)]


def texts(engine: Engine, start: str = "", judge: TinyHead | None = None) -> list[list[int]]:
    """What it says to all prompts at once. Every chain of drafts is the judge's."""
    found = {f"{start}{i}": list(prompt) for i, prompt in enumerate(prompts(engine.card.vocab))}
    for name, prompt in found.items():
        engine.add(Request(name, list(prompt), GREEDY))
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            drafts = event.proposal.tokens
            assert judge is None or drafts == judge.proposed(found[event.id], len(drafts)), f"after {len(found[event.id])} tokens"
            found[event.id] += event.tokens
    return list(found.values())


class Made(NamedTuple):
    algorithm: str
    target: Path
    head: TinyHead
    plain: list[list[int]]  # what the target says without drafts


@pytest.fixture(scope="module")
def made_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The checkpoints of a layout, written once."""

    @cache
    def made(layout: str) -> Made:
        algorithm, target, of_target, head, of_head = LAYOUTS[layout]
        directory = tmp_path_factory.mktemp("made")
        tiny = target(directory / "target", **of_target)
        plain = texts(build_engine(config_of(tiny.directory, SpecConfig(speculative_algorithm="none"))))
        return Made(algorithm, tiny.directory, head(directory / "head", tiny, **of_head), plain)

    return made


TREE = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}


DEPTHS: dict[str, tuple[int, dict[str, Any]]] = {"tree": (3, TREE), "3": (3, {}), "1": (1, {}), "0": (0, {})}


@pytest.mark.parametrize(("layout", "depth"), diagonal(LAYOUTS.keys(), DEPTHS))
def test_greedy_text_is_the_targets(made_with: Callable[[str], Made], layout: str, depth: tuple[int, dict[str, Any]]) -> None:
    """Also of requests that lose their pages and begin again, and of those that find their prompt in the cache. The drafts of a chain are
    those of a computation from scratch."""
    made, (steps, shape) = made_with(layout), depth
    spec = drafted(made.head.directory, made.algorithm, steps, **shape)
    engine = build_engine(config_of(made.target, spec, tokens=120), poison=True)
    for again in ("first", "again"):
        assert texts(engine, again, None if shape else made.head) == made.plain
    assert (engine.stats.preemptions_total > 0 or steps < 3) and (engine.stats.draft_tokens_total > 40) == (steps > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_a_computation_from_scratch(
    made_with: Callable[[str], Made], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_with(layout)
    heard: list[Tensor] = []
    for kind in (EagleHead, Eagle3Head):
        logits = kind.logits

        def hear(self: Any, x: Tensor, depth: int, logits: Any = logits) -> Tensor:
            heard.append(logits(self, x, depth))
            return heard[-1]

        monkeypatch.setattr(kind, "logits", hear)
    engine, compared = build_engine(config_of(made.target, drafted(made.head.directory, made.algorithm)), poison=True), 0
    for again in ("first", "again"):
        text, given = prompts(engine.card.vocab)[-1], list[Tensor]()
        engine.add(Request(again, list(text), GREEDY))
        while engine.has_work:
            heard.clear()
            for event in engine.step():
                if drafts := event.proposal.tokens:
                    wanted = made.head.draft_logits(text, drafts)
                    assert wanted.std() > 0.3, "the comparison would be about nothing"
                    torch.testing.assert_close(torch.cat(given[: len(drafts)]), wanted, atol=1e-4, rtol=1e-4)
                    compared += len(drafts)
                text, given = [*text, *event.tokens], list(heard)
    assert compared > 30


# Two in one tree, sources beside the head, rounded matrices, depths of the engine's own choice.
VARIANTS: dict[str, dict[str, Any]] = {
    "beside n-grams": {"algorithm": "EAGLE3+NGRAM"},
    "beside n-grams in a wide tree": {
        "algorithm": "EAGLE3+NGRAM", "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7
    },
    "int8": {"speculative_draft_model_quantization": "int8"},
    "adaptive": {"speculative_adaptive": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> TinyHead:
    directory = tmp_path_factory.mktemp("fitting")
    return eagle3(directory / "head", llama(directory / "target", num_hidden_layers=7))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants(fitting: TinyHead, variant: dict[str, Any]) -> None:
    target = fitting.target.directory
    engine = build_engine(config_of(target, drafted(fitting.directory, **variant), tokens=120), poison=True)
    plain = texts(build_engine(config_of(target, SpecConfig(speculative_algorithm="none"))))
    assert texts(engine) == plain and engine.stats.draft_tokens_total > 10


def test_drafts_after_steps_without_any(fitting: TinyHead) -> None:
    """Rows whose absorption was deferred are absorbed with the features that they had."""
    spec = drafted(fitting.directory, speculative_adaptive=True)
    engine = build_engine(config_of(fitting.target.directory, spec), poison=True)
    depths = cycle([0, 0, 0, 3, 0, 2, 3])
    assert engine.policy is not None
    engine.policy.choose = lambda reqs: next(depths)  # type: ignore[method-assign]
    texts(engine, "first", fitting), texts(engine, "again", fitting)
    assert engine.stats.draft_tokens_total > 40


def test_the_proof_holds(fitting: TinyHead, tmp_path: Path) -> None:
    """Every sampling feature: grammars, penalties, seeds and the rest, though the head knows a part of the vocabulary alone."""
    target = llama(tmp_path / "target", num_hidden_layers=7)
    write_tokenizer(target.directory)
    options: dict[str, Any] = {
        "model": str(target.directory), "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 32, "random_seed": 1,
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(fitting.directory), "speculative_num_steps": 3,
    }  # fmt: skip
    proof = prove(options, PROMPTS, tokens=16, draws=12)
    assert proof.holds, (proof.divergences, proof.laws)
    assert len(proof.laws) == 12 and min(proof.drafted[:3]) > 0


def test_its_memory_has_a_row_of_its_own(fitting: TinyHead) -> None:
    rows = dict(plan(config_of(fitting.target.directory, drafted(fitting.directory))).memory.rows)
    numbers = sum(tensor.numel() for tensor in fitting.tensors.values() if tensor.is_floating_point())
    taken = rows["weights, EAGLE-3 head (taps 1, 2, 3, 15 tokens)"] - 4 * numbers - 8 * 15  # the tokens of its head
    assert 0 < taken < 4 * 2 * 10 * 100, "a sine and a cosine for every position"


def test_dummy_weights(tmp_path: Path) -> None:
    target = llama(tmp_path / "target", num_hidden_layers=7)
    heads = eagle(tmp_path / "one", target), eagle3(tmp_path / "three", target)
    for file in tmp_path.rglob("*.safetensors*"):
        file.unlink()
    for head, kind in zip(heads, ("EAGLE head (a layer)", "EAGLE-3 head (taps 1, 2, 3, 15 tokens)"), strict=True):
        config = config_of(target.directory, drafted(head.directory, "EAGLE"), load_format="dummy")
        described, engine = plan(config).described, build_engine(config)
        assert described.arch.draft is not None and described.arch.draft.kind == kind
        texts(engine)
        assert engine.stats.draft_tokens_total > 40


def test_eagle_without_a_head_is_the_models_own_layer(tmp_path: Path) -> None:
    """Also one that was published apart in its layout."""
    tiny = deepseek(tmp_path / "target")
    own = plan(config_of(tiny.directory, SpecConfig(speculative_algorithm="EAGLE"))).described
    apart = plan(config_of(tiny.directory, drafted(write_nextn(tmp_path / "nextn", tiny, 0), "EAGLE"))).described
    assert own.arch.mtp is not None and own.head is None and own.nextn is None
    assert apart.arch.mtp is not None and apart.head is None and apart.nextn is not None
    with pytest.raises(LoadError, match="nowhere: no such directory"):
        plan(config_of(tiny.directory, drafted(tmp_path / "nowhere", "EAGLE")))


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "vocabulary": ({"vocab_size": 25}, ConfigError, "head/config.json: vocab_size is 25, and the model's is 24"),
    "hidden size": ({"hidden_size": 32}, ConfigError, "hidden_size is 32, and the model's is 48"),
    "target's hidden size": ({"target_hidden_size": 32}, ConfigError, "target_hidden_size is 32, and the model's is 48"),
    "many drafts": ({"draft_vocab_size": 25}, LoadError, "draft_vocab_size must be at most vocab_size = 24, got 25"),
    "no such layer": ({"eagle_config": {IDS: [1, 2, 7]}}, LoadError, rf"eagle_config\.{IDS} must be ascending .* in \[0, 6\]"),
    "inputs of layers": ({IDS: [0, 2]}, LoadError, rf"{IDS} must be ascending numbers of layers in \[1, 7\], for a model of 7 layers"),
    "taps in disorder": ({IDS: [3, 2]}, LoadError, r"must be ascending .* got \[3, 2\]"),
    "two norms": ({"fc_norm": True, "norm_before_fc": True}, LoadError, "fc_norm must be false together with norm_before_fc"),
    "a norm that is not there": ({"fc_norm": True}, LoadError, r"fc_norm\.0\.weight"),
    "MLA": ({"kv_lora_rank": 8}, UnsupportedModel, "kv_lora_rank = 8 is not supported; supported: none, for a head whose layers"),
    "biases": ({"mlp_bias": True}, UnsupportedModel, "mlp_bias = true is not supported"),
    "head's size": ({"draft_vocab_size": 14}, LoadError, "(lm_head|d2t)"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    target = llama(tmp_path / "target", num_hidden_layers=7)
    eagle3(tmp_path / "head", target, **change)
    with pytest.raises(error, match=message):
        build_engine(config_of(target.directory, drafted(tmp_path / "head")))


def test_heads_for_others_are_refused(tmp_path: Path) -> None:
    target = llama(tmp_path / "target")
    with pytest.raises(LoadError, match=rf"eagle_config\.{IDS} must be ascending numbers of layers in \[1, 3\]"):
        plan(config_of(target.directory, drafted(eagle3(tmp_path / "usual", target, taps=(0, 1, 2)).directory)))
    with pytest.raises(ConfigError, match=r"EAGLE3: .* is an EAGLE head, whose algorithm is EAGLE"):
        plan(config_of(target.directory, drafted(eagle(tmp_path / "one", target).directory)))
    streams = deepseek_v4(tmp_path / "streams")
    with pytest.raises(UnsupportedModel, match="needs one hidden state of a layer, and a deepseek_v4 has several"):
        plan(config_of(streams.directory, drafted(eagle(tmp_path / "for streams", streams).directory, "EAGLE")))


def changed(head: TinyHead, change: Change) -> Path:
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.tensors.items()}
    return write(head.directory, json.loads((head.directory / "config.json").read_text()), change(tensors))


def test_what_its_head_is_about_must_be_said(tmp_path: Path) -> None:
    target = llama(tmp_path / "target", num_hidden_layers=7)
    changes: dict[str, Change] = {
        "d2t is missing: draft_vocab_size is 15": lambda tensors: {k: t for k, t in tensors.items() if k != "d2t"},
        "d2t of the EAGLE-3 head must give ascending tokens below 24": lambda tensors: tensors | {"d2t": -torch.arange(15)},
        r"lm_head\.weight is missing": lambda tensors: {k: t for k, t in tensors.items() if k != "lm_head.weight"},
    }
    for i, (message, change) in enumerate(changes.items()):
        with pytest.raises(LoadError, match=message):
            build_engine(config_of(target.directory, drafted(changed(eagle3(tmp_path / str(i), target), change))))


def test_a_pickle_is_refused_with_the_way_to_convert_it(fitting: TinyHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_bytes((fitting.directory / "config.json").read_bytes())
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in fitting.tensors.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    for algorithm in ("EAGLE", "EAGLE3"):
        with pytest.raises(LoadError, match=r"pytorch_model\.bin is a pickle, which may run code") as refused:
            plan(config_of(fitting.target.directory, drafted(tmp_path, algorithm)))
    monkeypatch.chdir(tmp_path)
    exec(str(refused.value).split('python -c "')[1].rstrip('"'), {})
    engines = [build_engine(config_of(fitting.target.directory, drafted(path, "EAGLE"))) for path in (tmp_path, fitting.directory)]
    one, other = (texts(engine) and engine.stats.accepted_tokens_total for engine in engines)
    assert one == other
