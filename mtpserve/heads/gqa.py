"""What heads with layers of grouped-query attention have in common: dimensions from the config, and the names
of the layers' tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mtpserve.core.arch.model import Attention, ModelArch
from mtpserve.core.errors import UnsupportedModel
from mtpserve.models import gqa
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Rule


def arch(config: HFConfig, checkpoint: Checkpoint, name: str, trunk: ModelArch) -> ModelArch:
    """Returns the architecture of the layers, which Llama and Qwen3 have: a bias or a norm of each head is
    there if its tensor is. The trunk must not have several residual streams. Raises LoadError or
    UnsupportedModel."""
    if config.has("kv_lora_rank"):
        raise config.unsupported("kv_lora_rank", "none, for a head whose layers have grouped-query attention")
    if config.get_bool("mlp_bias", False):
        raise config.unsupported("mlp_bias", "false")
    if trunk.streams is not None:
        raise UnsupportedModel(
            f"{config.path}: this head needs one hidden state of a layer, and a {trunk.family} has several"
        )
    bias = config.get_bool("attention_bias", False)
    model_arch = gqa.arch(
        config.with_default("eos_token_id", 0),  # which heads need not name
        name,
        positions=2048,
        qkv_bias=stores(checkpoint, "self_attn.q_proj.bias", bias),
        out_bias=stores(checkpoint, "self_attn.o_proj.bias", bias),
        head_norms=stores(checkpoint, "self_attn.q_norm.weight", config.raw("model_type") == "qwen3"),
        trunk=gqa.windowed,
    )
    return replace(
        model_arch,
        layers=tuple(
            replace(kind, heads=model_arch.heads) for kind in model_arch.layers if isinstance(kind, Attention)
        ),
    )


def stores(checkpoint: Checkpoint, name: str, default: bool) -> bool:
    """A tensor with a name that ends so. `default`: where there are no tensors, but a config alone."""
    return (
        any(tensor_name.endswith(name) for tensor_name in checkpoint.tensors)
        if checkpoint.tensors
        else default
    )


def prefix_of(checkpoint: Checkpoint) -> str:
    """Returns the prefix of all tensors' names but the language-model head's."""
    return "model." if any(name.startswith("model.") for name in checkpoint.tensors) else ""


def rules(prefix: str, weights: Sequence[tuple[str, str]], dropped: Sequence[tuple[str, str]]) -> list[Rule]:
    """`weights`: patterns and parameters, `dropped`: patterns and reasons, of names after the prefix."""
    start = re.escape(prefix)
    return [Rule(start + name, target, Copy()) for name, target in weights] + [
        Rule(start + name, None, Drop(why)) for name, why in dropped
    ]
