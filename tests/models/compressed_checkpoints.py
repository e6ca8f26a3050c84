"""Tiny random checkpoints of DeepSeek-V4, whose layers see entries that stand for several tokens: see checkpoints.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer, DeepseekV4HyperHead, DeepseekV4RMSNorm

from mtpserve.quant.e2m1 import dequantize_e2m1
from mtpserve.quant.fp8 import dequantize_block, quantize_block
from tests.models.checkpoints import Tiny, randomise, settings, write

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# Texts of the tests have more entries than index_topk. With so many heads no two scores are equal.
DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 24,
    "hidden_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.7,
    "layer_types": [HEAVY, SPARSE, SLIDING, SPARSE],
    "compress_rates": {SPARSE: 2, HEAVY: 8},
    "num_hash_layers": 1,
    "sliding_window": 9,
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 5,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
MATRICES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
PUBLISHED = [
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"hc_head\.hc_", "hc_head_"),
    (r"\.mlp\.", ".ffn."),
    (r"\.self_attn\.compressor\.indexer\.(kv_proj|gate_proj|position_bias|kv_norm)", r".attn.indexer.compressor.\1"),
    (r"\.self_attn\.compressor\.indexer\.(scorer\.)?", ".attn.indexer."),
    (r"\.self_attn\.", ".attn."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"input_layernorm\.", "attn_norm."),
    (r"post_attention_layernorm\.", "ffn_norm."),
    (r"\b(attn|ffn)_hc\.", r"hc_\1_"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.position_bias$", ".ape"),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.kv_proj\.", ".wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"shared_experts\.gate_proj\.", "shared_experts.w1."),
    (r"shared_experts\.down_proj\.", "shared_experts.w2."),
    (r"shared_experts\.up_proj\.", "shared_experts.w3."),
]


def published_name(name: str) -> str:
    for pattern, new in PUBLISHED:
        name = re.sub(pattern, new, name)
    return name


def published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One of transformers' tensors by its published names: experts one by one."""
    start, dot, kind = published_name(name).partition(".experts.")
    if not dot:
        return {start: tensor}
    parts, found = MATRICES[kind], dict[str, Tensor]()
    for i, matrix in enumerate(tensor):
        found |= {f"{start}.experts.{i}.{part}.weight": half for part, half in zip(parts, matrix.chunk(len(parts)), strict=True)}
    return found


class V4MTP(nn.Module):
    """One of transformers' decoder layers, with what makes its input and what comes after it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (DeepseekV4RMSNorm(hidden, eps) for _ in range(3))
        self.e_proj, self.h_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.layer, self.hc_head = DeepseekV4DecoderLayer(config, config.num_hidden_layers), DeepseekV4HyperHead(config)


def longer(config: Any) -> Any:
    """For one more layer, with a window alone and experts that are chosen."""
    config.layer_types, config.mlp_layer_types = [*config.layer_types, SLIDING], [*config.mlp_layer_types, "moe"]
    return config


@dataclass(frozen=True)
class V4(Tiny):
    @torch.no_grad()
    def hidden(self, ids: list[int]) -> Tensor:
        """[tokens, streams * hidden]"""
        raw: list[Tensor] = []
        hook = self.trunk.model.hc_head.register_forward_pre_hook(lambda _, args: raw.append(args[0]))
        self.trunk.model(torch.tensor([ids]), use_cache=False)
        hook.remove()
        return raw[0][0].flatten(1)

    @torch.no_grad()
    def mtp_rows(self, ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        mtp, places = self.mtp, torch.arange(len(ids))
        streams = mtp.h_proj(mtp.hnorm(hidden.unflatten(1, (self.config["hc_mult"], -1))))
        x = (streams + mtp.e_proj(mtp.enorm(self.trunk.model.embed_tokens(torch.tensor(ids)))).unsqueeze(1))[None]
        apart = places[:, None] - places
        mask = torch.zeros(apart.shape).masked_fill((apart < 0) | (apart >= self.config["sliding_window"]), -torch.inf)[None, None]
        turned = {"main": self.trunk.model.rotary_emb(x, places[None], "main")}
        out = mtp.layer(x, position_embeddings=turned, position_ids=places[None], attention_mask=mask)
        logits: Tensor = self.trunk.lm_head(mtp.norm(mtp.hc_head(out)))[0]
        return logits, out[0].flatten(1)


def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the checkpoints are published: experts in four bits, other matrices in blocks of float8, each with its scales. What that loses the
    tensors lose, too."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            rows, columns = tensor.shape
            blocks = torch.randint(256, (rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (rows, columns // 32), dtype=torch.uint8)
            tensor.copy_(dequantize_e2m1(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu)))
            found |= {name: blocks.flatten(1).view(torch.int8), f"{stem}.scale": scales.view(torch.float8_e8m0fnu)}
        elif re.search(r"\.(attn|attn\.indexer)\.w[qko]\w+$|\.shared_experts\.w\d$|\.[eh]_proj$", stem):
            weight, scale = quantize_block(tensor)
            tensor.copy_(dequantize_block(weight, scale))
            found |= {name: weight, f"{stem}.scale": scale}
        else:
            found[name] = tensor
    return found


def deepseek_v4(directory: Path, seed: int = 0, fp4: bool = False, **options: Any) -> V4:
    """`options` replace entries of DEEPSEEK_V4; `fp4`: quantised as it is published."""
    config = {key: value for key, value in (DEEPSEEK_V4 | options).items() if value is not None}
    ours = DeepseekV4Config(**settings(config), attn_implementation="eager")
    trunk = DeepseekV4ForCausalLM(ours).float().eval()
    mtp = V4MTP(longer(ours)).eval()
    tables = [tensor for name, tensor in trunk.state_dict().items() if name.endswith("tid2eid")]
    randomise(trunk, mtp, seed=seed)
    for table in tables:
        table.copy_(torch.stack([torch.randperm(config["n_routed_experts"])[: table.shape[1]] for _ in table]))
    tensors: dict[str, Tensor] = {}
    for part, prefix in ((trunk, ""), (mtp, "mtp.0.")):
        for name, tensor in part.state_dict().items():
            tensors |= published(prefix + name.removeprefix("layer."), tensor)
    if fp4:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
        tensors = quantised(tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors |= {"mtp.0.emb.tok_emb.weight": tensors["embed.weight"].clone(), "mtp.0.head.weight": tensors["head.weight"].clone()}
    if config["tie_word_embeddings"]:
        del tensors["head.weight"]
    write(directory, config, tensors)
    return V4(directory, config, trunk, mtp, "embedding-hidden", "pre", tensors, "mtp.0.")
