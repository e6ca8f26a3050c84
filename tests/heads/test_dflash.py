"""DFlash and DFlash2 drafters in their published layout: their logits, the model's own text, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from mtpserve.config import SpecConfig
from mtpserve.core.errors import ConfigError, LoadError, UnsupportedModel
from mtpserve.core.plan import StepPlan
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.spec import sizes
from tests.heads.rounds import GREEDY, VOCAB, captured, engine_of, first_two, heard, proved, spec_of, texts
from tests.models.checkpoints import LAYERS, Tiny, deepseek, llama
from tests.spec.test_distribution import p_value

HIDDEN, HEADS, KV_HEADS, DIM, SIZE, GROUP, RANK, BEST, MASK, WINDOW = 48, 4, 2, 12, 40, 16, 6, 5, 23, 9
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2,
    "num_target_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "intermediate_size": SIZE,
    "rms_norm_eps": 1e-6, "rope_theta": 1000.0, "max_position_embeddings": 64, "attention_bias": False, "dtype": "float32",
    "block_size": 6, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
TWO = {
    "conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": BEST, "block_size": 6,
    "final_logit_softcapping": 2.0, "output_multiplier": 0.7,
}  # fmt: skip


def second(**more: Any) -> dict[str, Any]:
    section = CONFIG["dflash_config"] | TWO
    return {key: value for key, value in CONFIG.items() if key != "block_size"} | {
        "architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW,
        "dflash_config": section | more,
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "DFlash": CONFIG,
    "causal in windows": CONFIG | SLIDING,
    "sinks": CONFIG | {"dflash_config": CONFIG["dflash_config"] | {"attention_sink_bias": True, "attention_value_scale": 0.7}},
    "DFlash2": second(),
}


def write(directory: Path, config: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()

    def add(name: str, *shape: int) -> None:
        noise = torch.randn(*shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else noise * shape[-1] ** -0.5

    section, two = config["dflash_config"], config["architectures"] == ["DFlash2DraftModel"]
    add("fc.weight", HIDDEN, len(section["target_layer_ids"]) * HIDDEN)
    for name in ("hidden_norm", "norm"):
        add(f"{name}.weight", HIDDEN)
    for i in range(config["num_hidden_layers"]):
        shapes = {"q_proj": (HEADS * DIM, HIDDEN), "k_proj": (KV_HEADS * DIM, HIDDEN), "v_proj": (KV_HEADS * DIM, HIDDEN)}
        for name, shape in (shapes | {"o_proj": (HIDDEN, HEADS * DIM), "q_norm": (DIM,), "k_norm": (DIM,)}).items():
            add(f"layers.{i}.self_attn.{name}.weight", *shape)
        for name, shape in {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}.items():
            add(f"layers.{i}.mlp.{name}.weight", *shape)
        add(f"layers.{i}.input_layernorm.weight", HIDDEN)
        add(f"layers.{i}.post_attention_layernorm.weight", HIDDEN)
        if section.get("attention_sink_bias"):
            add(f"layers.{i}.self_attn.attention_sink_bias", HEADS)
        for name in ("attention_conv", "mlp_conv") if two else ():
            add(f"layers.{i}.{name}.base_kernel", 2, 2, HIDDEN)
            tensors[f"layers.{i}.{name}.base_kernel"] *= 5
            add(f"layers.{i}.{name}.kernel_projection.weight", 4 * HIDDEN // GROUP, HIDDEN)
    for name, shape in {"predecessor_codebook": (VOCAB, RANK), "successor_codebook": (VOCAB, RANK)}.items() if two else ():
        add(f"candidate_selector.{name}", *shape)
    if two:
        add("candidate_selector.hidden_projection.weight", RANK, HIDDEN)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


class Judge:
    """The drafter from scratch, over the whole text: no cache, dense masks."""

    def __init__(self, trunk: Tiny, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.trunk, self.config, self.tensors, self.known = trunk, config, tensors, dict[tuple[int, ...], Tensor]()

    def normed(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def features(self, ids: list[int]) -> Tensor:
        layers, found = self.trunk.trunk.model.layers, list[Tensor]()
        hooks = [
            layers[i].register_forward_hook(
                lambda _, __, out: found.append((out[0] if isinstance(out, tuple) else out).reshape(len(ids), -1))
            )
            for i in self.config["dflash_config"]["target_layer_ids"]
        ]
        self.trunk.trunk.model(torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat(found, -1)

    def heads(self, x: Tensor, name: str, places: Tensor) -> Tensor:
        """[rows, heads, dim], normed and rotated"""
        x = self.normed(self.product(x, f"{name}_proj").unflatten(-1, (-1, DIM)), f"{name}_norm")
        angles = places[:, None, None] * self.config["rope_theta"] ** (-torch.arange(0, DIM, 2) / DIM)
        first, last = x.chunk(2, -1)
        return torch.cat([first * angles.cos() - last * angles.sin(), last * angles.cos() + first * angles.sin()], -1)

    def attended(self, x: Tensor, context: Tensor, layer: int) -> Tensor:
        name, section = f"layers.{layer}.self_attn.", self.config["dflash_config"]
        before, rows = len(context), len(x)
        places = torch.arange(before + rows)
        both = torch.cat([context, x])
        q = self.heads(x, name + "q", places[before:])
        k = self.heads(both, name + "k", places).repeat_interleave(HEADS // KV_HEADS, 1)
        v = self.product(both, name + "v_proj").unflatten(-1, (-1, DIM)).repeat_interleave(HEADS // KV_HEADS, 1)
        sliding = self.config.get("layer_types", ["full_attention"] * 2)[layer] == "sliding_attention"
        own = places[before:, None] if self.config.get("is_causal", sliding) else places[-1:, None]
        seen = (places <= own) & (places > own - (WINDOW if sliding else 10**6))
        scores = torch.einsum("rhd,nhd->hrn", q, k) * DIM**-0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        if section.get("attention_sink_bias"):
            scores = torch.cat([scores, self.tensors[name + "attention_sink_bias"][:, None, None].expand(-1, rows, 1)], -1)
        out = torch.einsum("hrn,nhd->rhd", scores.softmax(-1)[..., : before + rows], v) * section.get("attention_value_scale", 1)
        return self.product(out.flatten(1), name + "o_proj")

    def around(self, x: Tensor, name: str, block: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer between DFlash2's convolutions, where there are any."""
        if f"{name}.base_kernel" not in self.tensors:
            return block(x)
        made = self.product(x, f"{name}.kernel_projection").view(len(x), 2, 2, HIDDEN // GROUP).repeat_interleave(GROUP, -1)
        kernels = self.tensors[f"{name}.base_kernel"] + made
        for side in range(2):
            x = kernels[:, side, 0] * x + kernels[:, side, 1] * torch.cat([torch.zeros(1, HIDDEN), x[:-1]])
            x = block(x) if side == 0 else x
        return x

    def gated(self, x: Tensor, name: str) -> Tensor:
        return self.product(F.silu(self.product(x, f"{name}.gate_proj")) * self.product(x, f"{name}.up_proj"), f"{name}.down_proj")

    def outputs(self, ids: list[int], steps: int) -> Tensor:
        """[steps, hidden] of the masks after the committed `ids`"""
        if tuple(ids) not in self.known:
            context = self.normed(self.product(self.features(ids)[:-1], "fc"), "hidden_norm")
            x = self.trunk.trunk.model.embed_tokens(torch.tensor([ids[-1]] + [MASK] * steps))
            for i in range(self.config["num_hidden_layers"]):
                attended = partial(self.attended, context=context, layer=i)
                x = x + self.around(self.normed(x, f"layers.{i}.input_layernorm"), f"layers.{i}.attention_conv", attended)
                gated = partial(self.gated, name=f"layers.{i}.mlp")
                x = x + self.around(self.normed(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp_conv", gated)
            self.known[tuple(ids)] = self.normed(x, "norm")[1:]
        return self.known[tuple(ids)]

    def logits(self, ids: list[int], depth: int, before: int, steps: int) -> Tensor:
        hidden, section = self.outputs(ids, steps)[depth], self.config["dflash_config"]
        logits = self.trunk.trunk.lm_head(hidden) * section.get("output_multiplier", 1)
        if "final_logit_softcapping" in section:
            logits = (logits / 2.0).tanh() * 2.0
        if "selector_rank" not in section:
            return logits
        best = logits.topk(BEST)
        name = "candidate_selector."
        gate = self.tensors[name + "predecessor_codebook"][before] * self.product(hidden, name + "hidden_projection")
        edges = self.tensors[name + "successor_codebook"][best.indices] @ gate
        return torch.full((VOCAB,), -torch.inf).scatter(0, best.indices, best.values + edges)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return llama(tmp_path_factory.mktemp("trunk"))


TREE = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
SHAPES: tuple[tuple[int, dict[str, Any]], ...] = ((0, {}), (1, {}), (3, {}), (3, TREE))


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_text_and_logits(trunk: Tiny, name: str, tmp_path: Path) -> None:
    judge = Judge(trunk, CONFIGS[name], write(tmp_path / "drafter", CONFIGS[name]))
    plain = texts(engine_of(trunk.directory, SpecConfig(speculative_algorithm="none")))
    preemptions = 0
    for steps, shape in SHAPES if name == "DFlash" else SHAPES[-2:] if name == "DFlash2" else SHAPES[-1:]:
        engine = engine_of(trunk.directory, spec_of("DFLASH", tmp_path / "drafter", steps, **shape), tokens=96)
        drafts = heard(engine) if steps else []
        # Requests lose their pages and begin again; the second time they find their prompts.
        for again in ("first", "again"):
            assert texts(engine, again) == plain, (steps, shape)
        preemptions += engine.stats.preemptions_total
        judge.known.clear()
        for ids, depth, before, logits in drafts[:: 1 + len(drafts) // 24]:
            torch.testing.assert_close(logits, judge.logits(ids, depth, before, steps), atol=1e-4, rtol=0)
        assert {each.depth for each in drafts} == set(range(steps))
    assert preemptions > 0


@pytest.mark.parametrize(("name", "backend"), [("causal in windows", "cpu"), ("DFlash2", "cpu"), ("causal in windows", "triton")])
@torch.inference_mode()
def test_other_backends(trunk: Tiny, name: str, backend: str, tmp_path: Path) -> None:
    judge = Judge(trunk, CONFIGS[name], write(tmp_path / "drafter", CONFIGS[name]))
    for shape in ({}, TREE) if backend == "cpu" else ({},):
        engine = engine_of(trunk.directory, spec_of("DFLASH", tmp_path / "drafter", 3, **shape), backend=backend)
        drafts = heard(engine)
        # An interpreted kernel takes its time.
        for name, prompt in (("one", list(range(12))), ("other", [5, 3, 1]))[: 2 if backend == "cpu" else 1]:
            engine.add(Request(name, prompt, SamplingParams(max_tokens=8 if backend == "cpu" else 2, temperature=0)))
        while engine.has_work:
            assert all(event.error is None for event in engine.step())
        for ids, depth, before, logits in drafts:
            torch.testing.assert_close(logits, judge.logits(ids, depth, before, 3), atol=1e-4, rtol=0)
        assert {each.depth for each in drafts} == {0, 1, 2}


@torch.inference_mode()
def test_steps_without_drafts_and_shallower_ones(trunk: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of steps that draft nothing are absorbed later, and a shallower step has the first drafts of the whole block."""
    monkeypatch.setattr(sizes, "DEFERRED", 4)
    judge = Judge(trunk, CONFIG, write(tmp_path / "drafter", CONFIG))
    engine = engine_of(trunk.directory, spec_of("DFLASH", tmp_path / "drafter", 3, speculative_adaptive=True))
    depths = cycle([0, 0, 3, 0, 1, 0, 0, 0, 0, 0, 0, 2])
    assert engine.policy is not None
    monkeypatch.setattr(engine.policy, "choose", lambda seqs: next(depths))
    drafts, launch, late = heard(engine), engine.runner.launch, list[int]()

    def launched(plan: StepPlan) -> Any:
        late.extend(span.num_deferred_tokens for span in plan.spans)
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", launched)
    assert texts(engine) == texts(engine_of(trunk.directory, SpecConfig(speculative_algorithm="none")))
    for ids, depth, before, logits in drafts:
        torch.testing.assert_close(logits, judge.logits(ids, depth, before, 3), atol=1e-4, rtol=0)
    assert {each.depth for each in drafts} == {0, 1, 2} and max(late) > 1


def test_another_trunk_n_grams_and_int8(tmp_path: Path) -> None:
    trunk = deepseek(tmp_path / "trunk").directory
    write(tmp_path / "drafter", second())
    plain = texts(engine_of(trunk, SpecConfig(speculative_algorithm="none")))
    assert texts(engine_of(trunk, spec_of("DFLASH+NGRAM", tmp_path / "drafter", 3))) == plain
    spec = spec_of("DFLASH", tmp_path / "drafter", 3, speculative_draft_model_quantization="int8", speculative_adaptive=True)
    assert texts(engine_of(trunk, spec, backend="cpu")) == texts(engine_of(trunk, SpecConfig(speculative_algorithm="none"), backend="cpu"))


@pytest.mark.parametrize("shape", [{}, {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}], ids=["chain", "tree"])
def test_a_captured_step_reads_nothing_on_the_host(
    trunk: Tiny, shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in for attention knows one group of pages.
    write(tmp_path / "drafter", {key: value for key, value in second().items() if key != "layer_types"})
    spec = spec_of("DFLASH", tmp_path / "drafter", 3, **shape)
    assert captured(engine_of(trunk.directory, spec, backend="reference"), monkeypatch) > 2


def test_dummy_weights(trunk: Tiny, tmp_path: Path) -> None:
    write(tmp_path / "drafter", second())
    (tmp_path / "drafter" / "model.safetensors").unlink()
    engine = engine_of(trunk.directory, spec_of("DFLASH", tmp_path / "drafter", 2), load_format="dummy")
    assert all(len(text) == GREEDY.max_tokens for text in texts(engine))


def test_what_is_drawn(trunk: Tiny, tmp_path: Path) -> None:
    """By rejection with the block's q: the law of plain decoding."""
    write(tmp_path / "drafter", second())
    law = partial(first_two, trunk.directory, draws=2000)
    assert (
        p_value(law(SpecConfig(speculative_algorithm="none"), seed=0), law(spec_of("DFLASH", tmp_path / "drafter", 2), seed=10**6)) > 1e-4
    )


def test_the_proof_holds(trunk: Tiny, tmp_path: Path) -> None:
    """Every sampling feature: grammars, penalties, seeds and the rest, in the same batches."""
    write(tmp_path / "drafter", second())
    proof = proved(trunk, tmp_path, "DFLASH", tmp_path / "drafter")
    assert proof.holds, (proof.divergences, proof.laws)
    assert len(proof.laws) == 12 and min(proof.drafted[:2]) > 0


SECTION = CONFIG["dflash_config"]
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another drafter": ({"architectures": ["Qwen3DSparkModel"]}, UnsupportedModel, r"Qwen3DSparkModel.* supported: DFlashDraftModel"),
    "Domino": ({"dflash_config": SECTION | {"projector_type": "domino"}}, UnsupportedModel, "projector_type = .domino. is not supported"),
    "speculators": ({"speculators_model_type": "dflash"}, UnsupportedModel, "speculators_model_type = .dflash. is not supported"),
    "another size": ({"hidden_size": 64}, ConfigError, "hidden_size is 64, and the model's is 48"),
    "another trunk": ({"num_target_layers": 36}, ConfigError, "num_target_layers is 36, and the model's is 3"),
    "a layer too deep": ({"dflash_config": SECTION | {"target_layer_ids": [1, 3]}}, LoadError, "target_layer_ids must be a list of the"),
    "no mask": ({"dflash_config": {"target_layer_ids": [1]}}, LoadError, "dflash_config.mask_token_id is missing"),
    "a mask too many": ({"dflash_config": SECTION | {"mask_token_id": 24}}, LoadError, "mask_token_id must be a token of the model"),
    "no window": ({"dflash_config": SECTION | {"use_swa": True}}, LoadError, "sliding_window is missing"),
    "a short block": ({"block_size": 3}, ConfigError, "speculative-num-steps must be at most 2, got 3: .* blocks of 3 tokens"),
    "another layer": ({"num_hidden_layers": 3}, LoadError, r"layers\.2\."),
}


@pytest.mark.parametrize("change", ERRORS)
def test_errors(trunk: Tiny, change: str, tmp_path: Path) -> None:
    options, error, message = ERRORS[change]
    write(tmp_path / "drafter", CONFIG)
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(CONFIG | options))
    with pytest.raises(error, match=message):
        engine_of(trunk.directory, spec_of("DFLASH", tmp_path / "drafter", 3))


def test_a_reduced_head_needs_the_heads_logits(trunk: Tiny, tmp_path: Path) -> None:
    write(tmp_path / "drafter", second())
    with pytest.raises(ConfigError, match="speculative-token-map needs a draft model whose logits are the head's"):
        engine_of(trunk.directory, spec_of("DFLASH", tmp_path / "drafter", 3, speculative_token_map="tokens.txt"))
