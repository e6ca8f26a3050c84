"""Tiny random Gemma 4 checkpoints, and the models that they were made from, in transformers' code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForCausalLM

from tests.models.checkpoints import LLAMA, Tiny, randomise, write

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4: dict[str, Any] = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "rope_theta", "tie_word_embeddings")} | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "head_dim": 12,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 7.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# As the small models have it.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 24,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "num_key_value_heads": 1,
}


def gemma4_small(directory: Path, **options: Any) -> Tiny:
    return gemma4(directory, **SMALL | options)


def gemma4(directory: Path, *, unified: bool = False, pictures: bool = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of GEMMA4; `pictures`: the text model in a checkpoint of one that sees them."""
    config = GEMMA4 | options
    makes = (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM) if unified else (Gemma4TextConfig, Gemma4ForCausalLM)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    trunk = makes[1](makes[0](**settings, attn_implementation="eager")).float().eval()
    randomise(trunk, seed=seed)
    for layer in trunk.model.layers:
        layer.layer_scalar.uniform_(0.6, 1.3)
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    if unified:
        config |= {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
    if pictures:
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = tensors["model.language_model.norm.weight"].clone()
        config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": config}
    write(directory, config, tensors)
    return Tiny(directory, config.get("text_config", config), trunk, None, "embedding-hidden", "post", tensors, "")


@dataclass(frozen=True)
class Pair:
    """A Gemma 4 and its assistant, and what transformers computes with both."""

    trunk: Tiny
    directory: Path  # the assistant's
    model: Any  # Gemma4AssistantForCausalLM

    @torch.no_grad()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """[drafts + 1, vocabulary]: what each of these drafts was drawn from, and the next one, where `ids` is all that is committed."""
        # transformers 5.23 stores nothing to be read where no layer of the model itself reads it.
        storing = {
            layer.self_attn.layer_type: layer.self_attn for layer in self.trunk.trunk.model.layers if hasattr(layer.self_attn, "k_proj")
        }
        for attention in storing.values():
            attention.store_full_length_kv = True
        out = self.trunk.trunk.model(torch.tensor([ids[:-1]]), use_cache=False, return_shared_kv_states=True)
        state, rows = out.last_hidden_state[:, -1:], []
        window = self.trunk.config["sliding_window"]
        shared = {
            name: tuple(part[:, :, -window:] if name == SLIDING else part for part in pair) for name, pair in out.shared_kv_states.items()
        }
        for token in [ids[-1], *drafts]:
            joined = torch.cat([self.trunk.trunk.model.embed_tokens(torch.tensor([[token]])), state], -1)
            given = self.model(inputs_embeds=joined, position_ids=torch.tensor([[len(ids) - 2]]), shared_kv_states=shared)
            state = given.last_hidden_state
            rows.append(given.logits[0, 0])
        return torch.stack(rows)


def assistant(directory: Path, trunk: Tiny, *, clusters: bool = False, seed: int = 5, **options: Any) -> Pair:
    """`options` replace entries of the text model's config."""
    same = ("vocab_size", "head_dim", "global_head_dim", "sliding_window", "num_key_value_heads", "attention_k_eq_v")
    text = {key: value for key, value in GEMMA4.items() if key not in ("architectures", "model_type")}
    text |= {"hidden_size": 20, "intermediate_size": 36, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL]}
    text |= {"vocab_size_per_layer_input": 0, **{name: trunk.config[name] for name in same}, **options}
    own = {"backbone_hidden_size": trunk.config["hidden_size"]}
    own |= {"use_ordered_embeddings": True, "num_centroids": 6, "centroid_intermediate_top_k": 2} if clusters else {}
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**text, attn_implementation="eager"), **own, attn_implementation="eager")
    # transformers 5.23 refuses a model all of whose layers read what another one stores.
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", ["reuse"] * text["num_hidden_layers"]):
        model = Gemma4AssistantForCausalLM(config).float().eval()
    randomise(model, seed=seed)
    if clusters:
        model.masked_embedding.token_ordering.copy_(torch.randperm(text["vocab_size"]))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    published = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": text}
    write(directory, published | own, tensors, shards=1)
    return Pair(trunk, directory, model)


def successor(directory: Path, clusters: bool = False) -> Pair:
    """A model whose next token depends on the last one alone, by a permutation, and an assistant that knows it."""
    trunk = gemma4(directory / "target", tie_word_embeddings=False, final_logit_softcapping=None)
    for name, tensor in trunk.tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("norm.weight", "layer_scalar")):
            tensor.fill_(1)
    embedding = trunk.tensors["model.embed_tokens.weight"]
    head = embedding.roll(5, 0)
    trunk.tensors["lm_head.weight"].copy_(head)
    write(trunk.directory, trunk.config, trunk.tensors)
    pair = assistant(directory / "assistant", trunk, clusters=clusters, hidden_size=trunk.config["hidden_size"])
    tensors = {name: tensor.clone() for name, tensor in pair.model.state_dict().items() if name != "lm_head.weight"}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("norm.weight", "layer_scalar")):
            tensor.fill_(1)
    both = torch.cat([torch.eye(trunk.config["hidden_size"]), torch.zeros(2 * [trunk.config["hidden_size"]])], 1)
    tensors |= {"pre_projection.weight": both, "model.embed_tokens.weight": head.clone()}
    save_file(tensors, pair.directory / "model-00001-of-00001.safetensors")
    return pair
