"""LongCat-Flash: a tiny random checkpoint in its layout, its MTP layer from transformers' blocks, and the published config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMLA, LongcatFlashMLP, LongcatFlashRMSNorm

from tests.models.checkpoints import DEEPSEEK, MTP, Tiny, randomise, renamed, settings, stored, write

COMMON = ("vocab_size", "hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
COMMON += ("v_head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "torch_dtype")
COMMON += ("bos_token_id", "eos_token_id")
LONGCAT: dict[str, Any] = {key: DEEPSEEK[key] for key in COMMON} | {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 20,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "moe_topk": 5,
    "routed_scaling_factor": 3.0,
    "router_bias": False,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
NAMES = {"embedding_norm": "layers.0.enorm.m", "hidden_norm": "layers.0.hnorm.m", "project": "layers.0.eh_proj", "norm": "norm"}


class DenseLayer(nn.Module):
    """One attention block and one feed-forward block, which is what a layer of the trunk has two of."""

    def __init__(self, config: LongcatFlashConfig) -> None:
        super().__init__()
        self.self_attn = LongcatFlashMLA(config, 2 * config.num_layers)
        self.transformer_layer = nn.ModuleDict({"mlp": LongcatFlashMLP(config)})
        self.input_layernorm, self.post_attention_layernorm = (
            LongcatFlashRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, **places: Any) -> Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), **places)[0]
        out: Tensor = x + self.transformer_layer["mlp"](self.post_attention_layernorm(x))
        return out


def longcat(directory: Path, fp8: bool = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of LONGCAT, None takes them out; `fp8`: the trunk, as it is published."""
    config = {key: value for key, value in (LONGCAT | options).items() if value is not None}
    ours = LongcatFlashConfig(**settings(config), head_dim=config["qk_rope_head_dim"], attn_implementation="eager")
    trunk = LongcatFlashForCausalLM(ours).float().eval()
    mtp = MTP(DenseLayer(ours), config["hidden_size"], config["rms_norm_eps"]).eval()
    randomise(trunk, mtp, seed=seed)
    tensors: dict[str, Tensor] = {}
    if fp8:
        config |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    for name, tensor in trunk.state_dict().items():
        # Of experts that compute nothing transformers has a first matrix, too.
        kept = tensor[: config["n_routed_experts"]] if name.endswith("experts.gate_up_proj") else tensor
        tensors |= stored(name, kept, fp8)
    for name, tensor in renamed(mtp.state_dict(), "model.mtp.", NAMES, "layers.0.").items():
        tensors |= stored(name, tensor, False)
    tensors["model.mtp.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, mtp, "embedding-hidden", "post", tensors, "model.mtp.")


LONGCAT_FLASH_CHAT = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28,
    "num_attention_heads": 64, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "attention_method": "MLA", "attention_bias": False, "n_routed_experts": 512, "moe_topk": 12, "zero_expert_num": 256,
    "zero_expert_type": "identity", "routed_scaling_factor": 6.0, "router_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0,
    "max_position_embeddings": 131072, "vocab_size": 131072, "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip


def longcat_next(config: Any, trunk: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    own = renamed(MTP(DenseLayer(config), config.hidden_size, config.rms_norm_eps).state_dict(), "model.mtp.", NAMES, "layers.0.")
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    return shapes | {"model.mtp.embed_tokens.weight": trunk["model.embed_tokens.weight"]}
