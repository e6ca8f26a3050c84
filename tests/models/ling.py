"""Ling 2.0, which transformers does not have: its published modelling code's mathematics in plain torch, under its tensors' names.

A tiny random checkpoint in its layout, and the published config.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from tests.models.checkpoints import LLAMA, Tiny, randomise, stored, write

LING: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "attention_bias"} | {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "num_nextn_predict_layers": 1,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 6,
    "rope_scaling": None,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
}


class Norm(nn.Module):
    def __init__(self, size: int, config: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, size = config, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = (self.heads + 2 * self.kv_heads) * size
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=config.use_qkv_bias)
        self.dense = nn.Linear(self.heads * size, config.hidden_size, bias=False)
        if config.use_qk_norm:
            self.query_layernorm, self.key_layernorm = Norm(size, config), Norm(size, config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [tokens, hidden]; cos and sin [tokens, numbers that are rotated]"""
        rows = self.query_key_value(x).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads])
        if self.config.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = (rotated(each, *angles) for each in (q, k))
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 0) for each in (k, v))
        scores = q @ k.mT / self.config.head_dim**0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        out: Tensor = self.dense(attended.transpose(0, 1).flatten(1))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [heads, tokens, numbers]: the first of each head, its first half with its second."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


class FeedForward(nn.Module):
    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.hidden_size, size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Gate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, number = config, config.num_experts
        self.weight, self.expert_bias = nn.Parameter(torch.empty(number, config.hidden_size)), nn.Parameter(torch.empty(number))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, experts]: each one's weight, 0 for those that are not chosen."""
        config, scores = self.config, F.linear(x, self.weight).sigmoid()
        biased = (scores + self.expert_bias).unflatten(-1, (config.n_group, -1))
        groups = biased.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
        outside = torch.ones(biased.shape[:2], dtype=torch.bool).scatter(1, groups, False)
        best = biased.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1).topk(config.num_experts_per_tok, -1).indices
        weights = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor


class Sparse(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.moe_intermediate_size
        self.gate, self.experts = Gate(config), nn.ModuleList(FeedForward(config, size) for _ in range(config.num_experts))
        self.shared_experts = FeedForward(config, size * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x)
        routed = sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        out: Tensor = routed + self.shared_experts(x)
        return out


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.attention = Attention(config)
        dense = number < config.first_k_dense_replace
        self.mlp = FeedForward(config, config.intermediate_size) if dense else Sparse(config)
        self.input_layernorm, self.post_attention_layernorm = (Norm(config.hidden_size, config) for _ in range(2))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), angles)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class NextLayer(Layer):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self.enorm, self.hnorm, self.final_layernorm = (Norm(config.hidden_size, config) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)


class Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        numbers, last = range(config.num_hidden_layers + config.num_nextn_predict_layers), config.num_hidden_layers
        self.layers = nn.ModuleList((Layer if number < last else NextLayer)(config, number) for number in numbers)
        self.norm = Norm(config.hidden_size, config)


class Whole(nn.Module):
    """The trunk's layers, then the MTP layer's; what fuses is there, too."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model = config, Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Of rotations as transformers makes them, which the published code calls."""
        config, scaling = self.config, self.config.rope_scaling or {"rope_type": "default"}
        parameters = {**scaling, "rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
        rope = Glm4MoeConfig(head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings, rope_parameters=parameters)
        cos, sin = Glm4MoeRotaryEmbedding(rope)(torch.empty(1), torch.arange(tokens)[None])
        return cos[0], sin[0]

    def hidden(self, ids: list[int]) -> Tensor:
        x, angles = self.model.word_embeddings(torch.tensor(ids)), self.angles(len(ids))
        for layer in self.model.layers[: self.config.num_hidden_layers]:
            x = layer(x, angles)
        out: Tensor = self.model.norm(x)
        return out


@dataclass(frozen=True)
class Ling(Tiny):
    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        found: Tensor = self.trunk.lm_head(self.trunk.hidden(ids))
        return found

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> Tensor:
        found: Tensor = self.trunk.hidden(ids)
        return found

    @torch.no_grad()
    def mtp_rows(self, ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.mtp.enorm(self.trunk.model.word_embeddings(torch.tensor(ids)))
        x = self.mtp.eh_proj(torch.cat([embedded, self.mtp.hnorm(hidden)], -1))
        normed = self.mtp.final_layernorm(self.mtp(x, self.trunk.angles(len(ids))))
        return self.trunk.lm_head(normed), normed


def ling(directory: Path, fp8: bool = False, seed: int = 0, **options: Any) -> Ling:
    """`options` replace entries of LING; `fp8`: the feed-forward blocks' matrices, and those that attend."""
    config = LING | options
    whole = Whole(SimpleNamespace(**config)).eval()
    randomise(whole, seed=seed)
    if config["tie_word_embeddings"]:
        whole.lm_head.weight = whole.model.word_embeddings.weight
    if fp8:
        config |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    tensors: dict[str, Tensor] = {}
    for name, tensor in whole.state_dict().items():
        kept = fp8 and (name.endswith("_proj.weight") or ".attention." in name) and tensor.dim() == 2
        tensors |= stored(name.replace(".experts.", ".expert_."), tensor, kept)
    tensors = {name.replace(".expert_.", ".experts."): tensor for name, tensor in tensors.items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(directory, config, tensors)
    last = f"model.layers.{config['num_hidden_layers']}."
    return Ling(directory, config, whole, whole.model.layers[-1], "embedding-hidden", "post", tensors, last)


LING_MINI = {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 20, "num_nextn_predict_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "norm_head": False, "partial_rotary_factor": 0.5, "rotary_dim": 64,
    "rope_theta": 600000, "rope_scaling": None, "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32",
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "vocab_size": 157184, "tie_word_embeddings": False,
    "eos_token_id": 156892, "pad_token_id": 156892, "torch_dtype": "bfloat16",
}  # fmt: skip


def ling_next(config: Any, whole: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The MTP layer's among the tensors of a whole model."""
    return {name: shape for name, shape in whole.items() if name.startswith(f"model.layers.{config.num_hidden_layers}.")}
