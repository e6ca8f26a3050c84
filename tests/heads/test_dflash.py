"""DFlash and DFlash2 drafters in their published layout: their logits, the model's own text, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from mtpserve.config import SpecConfig
from mtpserve.core.errors import ConfigError, LoadError, UnsupportedModel
from tests.heads.rounds import GREEDY, VOCAB, engine_of, heard, spec_of, texts
from tests.models.checkpoints import LAYERS, Tiny, deepseek, llama

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
            layers[i].register_forward_hook(lambda _, __, out: found.append((out[0] if isinstance(out, tuple) else out).reshape(len(ids), -1)))
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
    plain = texts(engine_of(trunk.directory, SpecConfig()))
    preemptions = 0
    for steps, shape in SHAPES if name in ("DFlash", "DFlash2") else SHAPES[-1:]:
        engine = engine_of(trunk.directory, spec_of("DFLASH", tmp_path / "drafter", steps, **shape), tokens=96)
        drafts = heard(engine) if steps else []
        # Requests lose their pages and begin again; the second time they find their prompts.
        for again in ("first", "again"):
            assert texts(engine, again) == plain, (steps, shape)
        preemptions += engine.stats.preemptions_total
        judge.known.clear()
        for ids, depth, before, logits in drafts[:: 1 + len(drafts) // 40]:
            torch.testing.assert_close(logits, judge.logits(ids, depth, before, steps), atol=1e-4, rtol=0)
        assert {each.depth for each in drafts} == set(range(steps))
    assert preemptions > 0
