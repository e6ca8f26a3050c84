"""Tiny random checkpoints in the published layouts, and the models that they were made from, in transformers' code.

Beside the files each helper returns a `Tiny`: the trunk, and an MTP layer put together from transformers' own decoder layer.
Nothing of it knows caches, pages or spans, so that it can judge what does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from mtpserve.quant.fp8 import dequantize_block, quantize_block

LAYERS = 3
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 24,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
MIMO: dict[str, Any] = LLAMA | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_nextn_predict_layers": 1,
    "attention_bias": True,
    "rope_theta": 640000.0,
    "use_sliding_window": False,
}
QWEN3_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
GLM4_MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}


# Of published float8 checkpoints.
FLOAT8, KEPT = ("_proj.weight", "_proj_with_mqa.weight", ".wq_b.weight", ".wk.weight"), ("eh_proj.weight", "weights_proj.weight")


class MTP(nn.Module):
    """The fusing tensors around one of transformers' decoder layers, under neutral names."""

    def __init__(self, layer: nn.Module, hidden: int, eps: float) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = (DeepseekV3RMSNorm(hidden, eps) for _ in range(3))
        self.project = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = layer


@dataclass(frozen=True)
class Tiny:
    """The judge. It computes every row anew each time, in float32 and with a dense mask."""

    directory: Path
    config: dict[str, Any]
    trunk: Any  # DeepseekV3ForCausalLM or Qwen2ForCausalLM
    mtp: Any  # MTP; None where the family is published without one
    order: Literal["embedding-hidden", "hidden-embedding"]
    fed: Literal["pre", "post"]  # hidden states before or after the final norm, the trunk's and the layer's own alike
    tensors: dict[str, Tensor]  # as they were written
    prefix: str  # of the MTP layer's tensors

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """[tokens, vocabulary]"""
        found: Tensor = self.trunk(torch.tensor([ids]), use_cache=False).logits[0]
        return found

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> Tensor:
        """[tokens, hidden], the state that the MTP layer is fed."""
        raw: list[Tensor] = []
        hook = self.trunk.model.norm.register_forward_pre_hook(lambda _, args: raw.append(args[0]))
        normed: Tensor = self.trunk.model(torch.tensor([ids]), use_cache=False).last_hidden_state
        hook.remove()
        return raw[0][0] if self.fed == "pre" else normed[0]

    @torch.no_grad()
    def mtp_rows(self, ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Row p: `hidden` of p and the id of token p+1 → logits of token p+2 [tokens, vocabulary], the row's own state."""
        halves = [self.mtp.embedding_norm(self.trunk.model.embed_tokens(torch.tensor(ids))), self.mtp.hidden_norm(hidden)]
        x = self.mtp.project(torch.cat(halves if self.order == "embedding-hidden" else halves[::-1], -1))[None]
        places = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        turned = self.trunk.model.rotary_emb(x, places)
        given = self.mtp.layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        out = (given[0] if isinstance(given, tuple) else given)[0]
        normed = self.mtp.norm(out)
        return self.trunk.lm_head(normed), out if self.fed == "pre" else normed

    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """[drafts, vocabulary]: what each of these drafts was drawn from, where `ids` is all that is committed."""
        hidden, shifted, rows = self.hidden(ids)[:-1], ids[1:], []
        for token in drafts:
            logits, states = self.mtp_rows(shifted, hidden)
            rows.append(logits[-1])
            hidden, shifted = torch.cat([hidden, states[-1:]]), [*shifted, token]
        return torch.stack(rows)


def deepseek(directory: Path, *, fp8: bool | Literal["trunk", "mtp"] = False, with_mtp: bool = True, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of DEEPSEEK; `fp8` may be one part's alone."""
    config = DEEPSEEK | options
    return numbered(directory, config, DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV3DecoderLayer, fp8, with_mtp, seed)


def glm4_moe(directory: Path, *, fp8: bool = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of GLM4_MOE."""
    return numbered(directory, GLM4_MOE | options, Glm4MoeConfig, Glm4MoeForCausalLM, Glm4MoeDecoderLayer, fp8, True, seed)


def glm4_moe_lite(directory: Path, *, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of DEEPSEEK, whose layout it has."""
    config = DEEPSEEK | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"} | options
    config = {key: value for key, value in config.items() if key != "first_k_dense_replace"}
    return numbered(directory, config, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, Glm4MoeLiteDecoderLayer, False, True, seed)


def numbered(
    directory: Path, config: dict[str, Any], config_of: Any, trunk_of: Any, layer_of: Any, fp8: bool | str, with_mtp: bool, seed: int
) -> Tiny:  # fmt: skip
    """The MTP layer's number is the first after the trunk's."""
    layers = config["num_hidden_layers"]
    ours = config_of(**settings(config), attn_implementation="eager")
    trunk = trunk_of(ours).float().eval()
    if getattr(ours, "mlp_layer_types", None) is not None:
        ours.mlp_layer_types = [*ours.mlp_layer_types, "sparse"]
    if getattr(ours, "indexer_types", None) is not None:
        ours.indexer_types = [*ours.indexer_types, "full"]
    mtp = MTP(layer_of(ours, layers), config["hidden_size"], config["rms_norm_eps"]).eval()
    randomise(trunk, mtp, seed=seed)
    prefix = f"model.layers.{layers}."
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
    tensors: dict[str, Tensor] = {}
    if fp8:
        config |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    for name, tensor in [*trunk.state_dict().items(), *renamed(mtp.state_dict(), prefix, names).items()]:
        tensors |= stored(name, tensor, bool(fp8) and (fp8 is True or (fp8 == "mtp") == name.startswith(prefix)))
    tensors |= {prefix + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    tensors |= {prefix + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
    if not with_mtp:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, mtp, "embedding-hidden", "post", tensors, prefix)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' config classes take."""
    return {key: value for key, value in config.items() if key not in ("architectures", "model_type")}


def without_mtp(directory: Path, config: dict[str, Any], config_of: Any, trunk_of: Any, seed: int = 0) -> Tiny:
    """A family that is published without an MTP layer."""
    trunk = trunk_of(config_of(**settings(config), attn_implementation="eager")).float().eval()
    randomise(trunk, seed=seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in trunk.state_dict().items():
        tensors |= stored(name, tensor, False)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, None, "embedding-hidden", "post", tensors, "")


def llama(directory: Path, **options: Any) -> Tiny:
    return without_mtp(directory, LLAMA | options, LlamaConfig, LlamaForCausalLM)


def mistral(directory: Path, **options: Any) -> Tiny:
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None} | options
    return without_mtp(directory, config, MistralConfig, MistralForCausalLM)


def qwen2(directory: Path, **options: Any) -> Tiny:
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | options
    return without_mtp(directory, {k: v for k, v in config.items() if k != "attention_bias"}, Qwen2Config, Qwen2ForCausalLM)


def qwen3(directory: Path, **options: Any) -> Tiny:
    config = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | options
    return without_mtp(directory, config, Qwen3Config, Qwen3ForCausalLM)


def qwen2_moe(directory: Path, **options: Any) -> Tiny:
    config = LLAMA | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"} | QWEN3_EXPERTS | options
    config = {k: v for k, v in config.items() if k != "attention_bias"} | {"shared_expert_intermediate_size": 28}
    return without_mtp(directory, config, Qwen2MoeConfig, Qwen2MoeForCausalLM)


def qwen3_moe(directory: Path, **options: Any) -> Tiny:
    config = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | QWEN3_EXPERTS | options
    return without_mtp(directory, config, Qwen3MoeConfig, Qwen3MoeForCausalLM)


def mimo(directory: Path, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of MIMO."""
    config = MIMO | options
    ours = Qwen2Config(**settings(config), attn_implementation="eager")
    trunk = Qwen2ForCausalLM(ours).float().eval()
    mtp = MTP(Qwen2DecoderLayer(ours, config["num_hidden_layers"] - 1), config["hidden_size"], config["rms_norm_eps"]).eval()
    randomise(trunk, mtp, seed=seed)
    prefix = "model.mtp_layers.0."
    names = {"embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "project": "input_proj", "norm": "final_layernorm"}
    tensors = {name: tensor.clone() for name, tensor in (trunk.state_dict() | renamed(mtp.state_dict(), prefix, names)).items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, mtp, "hidden-embedding", "pre", tensors, prefix)


def randomise(*modules: nn.Module, seed: int) -> None:
    """Every number that is not whole, norms and the router's bias among them; matrices such that activations keep their size."""
    torch.manual_seed(seed)
    for name, tensor in (pair for module in modules for pair in module.state_dict().items()):
        if not tensor.is_floating_point():
            continue
        if tensor.dim() >= 2:
            tensor.normal_(0, 1 if "embed" in name else max(tensor.shape[-1], 1) ** -0.5)
        else:
            tensor.normal_(1 if "norm" in name else 0, 0.2)


def renamed(mtp: Mapping[str, Tensor], prefix: str, names: Mapping[str, str], block: str = "") -> dict[str, Tensor]:
    """An MTP layer's tensors as the checkpoint calls them; `block` is before those of the decoder layer."""
    found = {}
    for name, tensor in mtp.items():
        part, rest = name.split(".", 1)
        found[prefix + (block + rest if part == "layer" else f"{names[part]}.{rest}")] = tensor
    return found


def stored(name: str, tensor: Tensor, fp8: bool) -> dict[str, Tensor]:
    """One of transformers' tensors under its published names: experts one by one, matrices in fp8 if asked for.

    What fp8 loses the model loses too: its tensor is overwritten.
    """
    parts: dict[str, Tensor] = {}
    start, dot, kind = name.partition(".experts.")
    if not dot:
        parts = {name: tensor}
    else:
        for i, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            for half, part in zip(halves, ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",), strict=True):
                parts[f"{start}.experts.{i}.{part}.weight"] = half
    found: dict[str, Tensor] = {}
    for part_name, part_tensor in parts.items():
        if part_tensor.numel() == 0:
            continue  # the shared expert of a model that has none
        if fp8 and part_name.endswith(FLOAT8) and not part_name.endswith(KEPT):
            weight, scale = quantize_block(part_tensor)
            part_tensor.copy_(dequantize_block(weight, scale))
            found |= {part_name: weight, part_name + "_scale_inv": scale}
        else:
            found[part_name] = part_tensor.clone().contiguous()
    return found


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 2) -> Path:
    """config.json, numbered shards and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names[i::shards]}, directory / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def write_nextn(directory: Path, tiny: Tiny, layer: int, keep: Callable[[str], bool] = lambda _: True) -> Path:
    """The MTP layer alone, as it is published on its own: one file without an index. `keep` is asked for names inside the layer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny.config | {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    inside = {name.removeprefix(tiny.prefix): tensor for name, tensor in tiny.tensors.items() if name.startswith(tiny.prefix)}
    layer_tensors = {f"model.layers.{layer}.{name}": tensor for name, tensor in inside.items() if keep(name)}
    save_file(layer_tensors, directory / "nextn_layer_parameters.safetensors")
    return directory
