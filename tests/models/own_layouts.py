"""Tiny random checkpoints of families whose tensors are laid out or named as nobody else's, beside those in checkpoints.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
)
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeDecoderLayer
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashDecoderLayer

from mtpserve.quant.e2m1 import dequantize_e2m1
from mtpserve.quant.fp8 import dequantize_block, quantize_block
from tests.models.checkpoints import LLAMA, MTP, Tiny, randomise, renamed, settings, stored, write

OSS_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
GPT_OSS: dict[str, Any] = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "attention_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "rope_theta": 150000.0,
    "rope_scaling": OSS_YARN,
}

MINIMAX_M2: dict[str, Any] = LLAMA | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 6,
    "attn_type_list": [1, 1, 1],
    "qk_norm_type": "per_layer",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
}

ERNIE: dict[str, Any] = LLAMA | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "num_nextn_predict_layers": 1,
    "use_bias": False,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 20,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}

MIMO_V2: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 4,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "num_key_value_heads": 1,
    "head_dim": 12,
    "v_head_dim": 10,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 12,
    "swa_v_head_dim": 10,
    "sliding_window": 9,
    "sliding_window_size": 9,
    "rope_theta": 5000000.0,
    "swa_rope_theta": 10000.0,
    "partial_rotary_factor": 0.334,
    "attention_value_scale": 0.707,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "layernorm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "n_shared_experts": None,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
}
MODULES = 4


@dataclass(frozen=True)
class Modules(Tiny):
    """With an MTP layer of its own for each depth; they have a window."""

    depths: tuple[MTP, ...]

    @torch.no_grad()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """Module k: the trunk's hidden states, and the tokens k + 1 places after them, of which the last k are drafts."""
        hidden, text = self.hidden(ids)[:-1], ids + drafts
        rows = [self.module_rows(mtp, text[k + 1 :][: len(hidden)], hidden) for k, mtp in enumerate(self.depths[: len(drafts)])]
        return torch.stack([each[-1] for each in rows])

    def module_rows(self, mtp: MTP, ids: list[int], hidden: Tensor) -> Tensor:
        halves = mtp.embedding_norm(self.trunk.model.embed_tokens(torch.tensor(ids))), mtp.hidden_norm(hidden)
        x, places = mtp.project(torch.cat(halves, -1))[None], torch.arange(len(ids))
        apart = places[:, None] - places
        mask = torch.zeros(apart.shape).masked_fill((apart < 0) | (apart > self.config["sliding_window_size"]), -torch.inf)[None, None]
        turned = self.trunk.model.rotary_emb(x, places[None], "sliding_attention")
        out = mtp.layer(x, attention_mask=mask, position_ids=places[None], position_embeddings=turned)[0]
        found: Tensor = self.trunk.lm_head(mtp.norm(out))
        return found


def gpt_oss(directory: Path, mxfp4: bool = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of GPT_OSS; `mxfp4`: the experts as they are published, and the judge's are what that loses nothing of."""
    config = GPT_OSS | options
    trunk = GptOssForCausalLM(GptOssConfig(**settings(config), attn_implementation="eager")).float().eval()
    randomise(trunk, seed=seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in trunk.state_dict().items():
        if mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            tensor.copy_(dequantize_e2m1(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu)).mT)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = tensor.clone()
    if mxfp4:
        config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, None, "embedding-hidden", "post", tensors, "")


def minimax_m2(directory: Path, fp8: bool = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of MINIMAX_M2. By the names of the published files, not by transformers'."""
    config = MINIMAX_M2 | options
    trunk = MiniMaxM2ForCausalLM(MiniMaxM2Config(**settings(config), attn_implementation="eager")).float().eval()
    randomise(trunk, seed=seed)
    names, tensors = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}, dict[str, Tensor]()
    for name, tensor in trunk.state_dict().items():
        for own, part in stored(name, tensor, fp8).items():
            tensors[re.sub(r"(?<=\d\.)(gate|up|down)_proj", lambda found: names[found[0]], own).replace(".mlp.", ".block_sparse_moe.")] = (
                part
            )
    if fp8:
        config |= {"quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}}
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, None, "embedding-hidden", "post", tensors, "")


def ernie(directory: Path, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of ERNIE."""
    config = {key: value for key, value in (ERNIE | options).items() if key != "attention_bias"}
    ours = Ernie4_5_MoeConfig(**settings(config), attn_implementation="eager")
    trunk = Ernie4_5_MoeForCausalLM(ours).float().eval()
    # A layer that comes before those with experts is dense.
    dense = Ernie4_5_MoeConfig(**settings(config | {"moe_layer_start_index": 1}), attn_implementation="eager")
    mtp = MTP(Ernie4_5_MoeDecoderLayer(dense, 0), config["hidden_size"], config["rms_norm_eps"]).eval()
    mtp.norm = trunk.model.norm
    randomise(trunk, mtp, seed=seed)
    names = {"embedding_norm": "emb_norm.0", "hidden_norm": "hidden_norm.0", "project": "linear_proj.0"}
    own = {name: tensor for name, tensor in mtp.state_dict().items() if not name.startswith("norm.")}
    parts = renamed(own, "model.mtp_", names, block="block.0.")
    tensors: dict[str, Tensor] = {}
    for name, tensor in (trunk.state_dict() | parts).items():
        tensors |= stored(name.replace("mlp.gate.moe_statics", "mlp.moe_statics"), tensor, False)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, mtp, "embedding-hidden", "pre", tensors, "model.mtp_")


def in_chunks(name: str, attention: Any, chunks: int) -> dict[str, Tensor]:
    """One float8 matrix of chunks, each with its share of queries, keys and values and with blocks of its own."""
    projections = [attention.q_proj.weight.data, attention.k_proj.weight.data, attention.v_proj.weight.data]
    numbers, scales = [], []
    for shares in zip(*(projection.chunk(chunks) for projection in projections), strict=True):
        weight, scale = quantize_block(torch.cat(shares))
        for share, kept in zip(shares, dequantize_block(weight, scale).split([len(share) for share in shares]), strict=True):
            share.copy_(kept)
        numbers.append(weight)
        scales.append(scale)
    return {name: torch.cat(numbers), f"{name}_scale_inv": torch.cat(scales)}


def mimo_v2(directory: Path, seed: int = 0, fused: bool = False, **options: Any) -> Modules:
    """`options` replace entries of MIMO_V2. `fused`: queries, keys and values as V2.5 stores them, and the judge has what that leaves."""
    config = MIMO_V2 | options
    rope = {"rope_type": "default", "partial_rotary_factor": config["partial_rotary_factor"]}
    thetas = {"full_attention": config["rope_theta"], "sliding_attention": config["swa_rope_theta"]}
    names = [["full_attention", "sliding_attention"][sliding] for sliding in (*config["hybrid_layer_pattern"], 1)]
    made = MiMoV2FlashConfig(
        **{key: value for key, value in settings(config).items() if not key.startswith(("swa_", "rope_", "partial_"))},
        rms_norm_eps=config["layernorm_epsilon"],
        rope_parameters={name: rope | {"rope_theta": theta} for name, theta in thetas.items()},
        layer_types=names[:-1],
        mlp_layer_types=[["dense", "sparse"][sparse] for sparse in config["moe_layer_freq"]],
        attn_implementation="eager",
    )
    trunk = MiMoV2FlashForCausalLM(made).float().eval()
    made.layer_types, made.mlp_layer_types = names, [*made.mlp_layer_types, "dense"]
    number, hidden = config["num_hidden_layers"], config["hidden_size"]
    depths = [MTP(MiMoV2FlashDecoderLayer(made, number), hidden, config["layernorm_epsilon"]).eval() for _ in range(MODULES)]
    randomise(trunk, *depths, seed=seed)
    names_of = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "final_layernorm"}
    tensors: dict[str, Tensor] = {}
    if fused:
        config |= {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"}
        config |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
        attending = {f"model.layers.{i}.self_attn.": layer.self_attn for i, layer in enumerate(trunk.model.layers)}
        attending |= {f"model.mtp.layers.{k}.self_attn.": mtp.layer.self_attn for k, mtp in enumerate(depths)}
        for start, module in attending.items():
            tensors |= in_chunks(start + "qkv_proj.weight", module, config["num_key_value_heads"])
        tensors |= {name: torch.zeros(3, 2) for name in ("visual.blocks.0.attn.qkv.weight", "audio_encoder.proj.weight")}
    for name, tensor in trunk.state_dict().items():
        tensors |= stored(name.replace("self_attn.sinks", "self_attn.attention_sink_bias"), tensor, False)
    for k, mtp in enumerate(depths):
        for name, tensor in renamed(mtp.state_dict(), f"model.mtp.layers.{k}.", names_of).items():
            name = name.replace("self_attn.sinks", "self_attn.attention_sink_bias")
            tensors[name.replace("post_attention_layernorm", "pre_mlp_layernorm")] = tensor.clone()
    if fused:
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search(r"self_attn\.[qkv]_proj", name)}
    write(directory, config, tensors)
    return Modules(directory, config, trunk, depths[0], "embedding-hidden", "post", tensors, "model.mtp.layers.", tuple(depths))
