"""Tiny random EAGLE heads in the published layouts, and what they compute: a few lines of torch, without caches, pages or spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.checkpoints import Tiny, write

EPS, THETA = 1e-5, 3000.0
HEADS, KV_HEADS, HEAD_DIM, SIZE = 3, 1, 10, 40
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "head_dim": HEAD_DIM,
    "intermediate_size": SIZE,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class TinyHead:
    """`tensors` are as they were written but for the names of the layers: layers.0.* in every layout."""

    directory: Path
    target: Tiny
    tensors: dict[str, Tensor]
    layers: int
    taps: tuple[int, ...]  # none: EAGLE-1, or EAGLE-3 without them
    fused: bool  # EAGLE-3
    norm_output: bool = False
    norm_before_residual: bool = False
    window: int = 1000

    def features(self, ids: Sequence[int]) -> Tensor:
        """[tokens, width] of the target."""
        trunk, found = self.target.trunk.model, []
        if not self.taps:
            return trunk(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]
        hooks = [
            trunk.layers[tap].register_forward_hook(lambda _, __, out: found.append((out[0] if isinstance(out, tuple) else out)[0]))
            for tap in self.taps
        ]
        trunk(torch.tensor([list(ids)]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.cat(found, -1)

    @torch.no_grad()
    def draft_logits(self, ids: Sequence[int], drafts: Sequence[int | None]) -> Tensor:
        """[drafts, the head's tokens]: what each of these drafts was drawn from, where `ids` is all that is committed. None: the most
        likely."""
        states, shifted, rows = self.projected(self.features(ids)[:-1]), list(ids[1:]), []
        for token in drafts:
            out = self.passed(shifted, states)
            normed = self.norm("norm", out) if self.fused else out
            rows.append(self.head(normed)[-1])
            states = torch.cat([states, (normed if self.norm_output else out)[-1:]])
            shifted.append(self.best(rows[-1]) if token is None else token)
        return torch.stack(rows)

    def best(self, logits: Tensor) -> int:
        row = int(logits.argmax())
        return row + (int(self.tensors["d2t"][row]) if "d2t" in self.tensors else 0)

    def proposed(self, ids: Sequence[int], count: int) -> list[int]:
        """The most likely drafts."""
        return [self.best(row) for row in self.draft_logits(ids, [None] * count)] if count else []

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.tensors[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def head(self, x: Tensor) -> Tensor:
        own = self.fused and "lm_head.weight" in self.tensors
        return self.linear("lm_head", x) if own else self.target.trunk.lm_head(x)

    def embedded(self, ids: Sequence[int]) -> Tensor:
        own = self.tensors.get("embed_tokens.weight") if self.fused else None
        return (self.target.trunk.model.embed_tokens.weight if own is None else own)[torch.tensor(ids)]

    def projected(self, features: Tensor) -> Tensor:
        if not self.fused or not self.taps:
            return features
        if "input_norm.weight" in self.tensors:
            features = self.norm("input_norm", features)
        if "fc_norm.0.weight" in self.tensors:
            parts = features.chunk(len(self.taps), -1)
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return self.linear("fc", features)

    def passed(self, ids: Sequence[int], states: Tensor) -> Tensor:
        embedded = self.embedded(ids)
        x = states if self.fused else self.linear("fc", torch.cat([embedded, states], -1))
        for i in range(self.layers):
            layer, given = f"layers.{i}", x
            if i > 0:
                given = self.norm(f"{layer}.input_layernorm", x)
            elif self.fused:
                normed = self.norm(f"{layer}.hidden_norm", x)
                given = torch.cat([self.norm(f"{layer}.input_layernorm", embedded), normed], -1)
                x = normed if self.norm_before_residual else x
            x = x + self.attended(f"{layer}.self_attn", given)
            given = self.norm(f"{layer}.post_attention_layernorm", x)
            gate, up = (self.linear(f"{layer}.mlp.{part}_proj", given) for part in ("gate", "up"))
            x = x + self.linear(f"{layer}.mlp.down_proj", F.silu(gate) * up)
        return x

    def attended(self, name: str, x: Tensor) -> Tensor:
        q, k, v = (self.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for part in "qkv")
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        places = torch.arange(len(x))
        angles = torch.outer(places, THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
        q, k = (
            part * angles.cos() + torch.cat([-part[..., HEAD_DIM // 2 :], part[..., : HEAD_DIM // 2]], -1) * angles.sin() for part in (q, k)
        )
        behind = places[:, None] - places
        seen = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), (behind >= 0) & (behind < self.window))
        return self.linear(f"{name}.o_proj", seen.transpose(0, 1).flatten(1))


def layer_tensors(number: int, hidden: int, inputs: int, bias: bool = False, norms: bool = False) -> dict[str, tuple[int, ...]]:
    q, kv, name = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, f"layers.{number}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.input_layernorm.weight": (hidden,),
        f"{name}.post_attention_layernorm.weight": (hidden,),
        f"{name}.self_attn.q_proj.weight": (q, inputs),
        f"{name}.self_attn.k_proj.weight": (kv, inputs),
        f"{name}.self_attn.v_proj.weight": (kv, inputs),
        f"{name}.self_attn.o_proj.weight": (hidden, q),
        f"{name}.mlp.gate_proj.weight": (SIZE, hidden),
        f"{name}.mlp.up_proj.weight": (SIZE, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, SIZE),
    }
    if bias:
        shapes |= {f"{name}.self_attn.{part}_proj.bias": (size,) for part, size in (("q", q), ("k", kv), ("v", kv))}
    if norms:
        shapes |= {f"{name}.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    return shapes


def filled(shapes: dict[str, tuple[int, ...]], seed: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.2 * noise if "norm" in name else noise * (1.0 if "embed" in name or len(shape) == 1 else shape[-1] ** -0.5)
    return found


def eagle(directory: Path, target: Tiny, layers: int = 1, bias: bool = True, copies: bool = True, **options: Any) -> TinyHead:
    """The authors' EAGLE-1 and EAGLE-2. `copies`: of the target's embedding and head, which are left alone."""
    hidden, vocab = target.config["hidden_size"], target.config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)} | ({"fc.bias": (hidden,)} if bias else {})
    for i in range(layers):
        shapes |= layer_tensors(i, hidden, hidden)
    del shapes["layers.0.input_layernorm.weight"]
    tensors = filled(shapes | ({"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)} if copies else {}))
    config = LLAMA | {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": layers, "bias": bias} | options
    write(directory, config, tensors)
    return TinyHead(directory, target, tensors, layers, (), fused=False)


def eagle3(
    directory: Path, target: Tiny, *, taps: tuple[int, ...] | None = None, hidden: int | None = None, drafts: int | None = 15,
    middle: bool = True, embedding: bool = False, own_head: bool = True, layers: int = 1, bias: bool = False, head_norms: bool = False,
    norms: str = "", norm_output: bool = False, norm_before_residual: bool = False, window: int = 1000, prefix: str = "",
    nested: bool = False, **options: Any,
) -> TinyHead:  # fmt: skip
    """`drafts`: tokens of its head, None: all. `middle`: its layer is called so. `nested`: the layout of speculators. `options` of the
    config, in which `taps` must be said if they are not the usual ones."""
    trunk, vocab, count = target.config["hidden_size"], target.config["vocab_size"], target.config["num_hidden_layers"]
    taps = (1, count // 2 - 1, count - 4) if taps is None else taps
    own = hidden or trunk
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (own,)} | ({"fc.weight": (own, len(taps) * trunk)} if taps else {})
    for i in range(layers):
        shapes |= layer_tensors(i, own, own if i else 2 * own, bias, head_norms)
    shapes["layers.0.hidden_norm.weight"] = (own,)
    if own_head:
        shapes["lm_head.weight"] = (drafts or vocab, own)
    if embedding:
        shapes["embed_tokens.weight"] = (vocab, own)
    if norms == "fc_norm":
        shapes |= {f"fc_norm.{i}.weight": (trunk,) for i in range(len(taps))}
    if norms == "norm_before_fc":
        shapes["input_norm.weight"] = (len(taps) * trunk,)
    tensors = filled(shapes)
    if drafts is not None:
        chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(8))[:drafts].sort().values
        tensors["d2t"] = chosen - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter(0, chosen, True)
    ours = {"norm_output": norm_output, "norm_before_residual": norm_before_residual} | ({norms: True} if norms else {})
    config = LLAMA | {"hidden_size": own, "vocab_size": vocab, "num_hidden_layers": layers}
    if own != trunk:
        ours["target_hidden_size"] = trunk
    ours |= {"draft_vocab_size": vocab if drafts is None else drafts}
    if nested:
        kind = {"model_type": "qwen3"} if head_norms else {}
        sliding = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * layers}
        inner = config | kind | (sliding if window < 1000 else {})
        config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "model_type": "speculators",
                  "speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": inner}  # fmt: skip
    outside = ("lm_head.weight", "d2t", "t2d")
    named = {name.replace("layers.0.", "midlayer.") if middle else name: tensor for name, tensor in tensors.items()}
    write(directory, config | ours | options, {name if name in outside else prefix + name: t for name, t in named.items()})
    return TinyHead(directory, target, tensors, layers, taps, True, norm_output, norm_before_residual, window)
