"""DeepSeek-V3 and R1: latent attention, a few dense layers, then mixture of experts; the MTP layer's number
is the first after the trunk's.

Tensor names and mathematics: the checkpoint's README_WEIGHTS and https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import torch
from torch import nn

from mtpserve.core.arch.latent import MLAArch
from mtpserve.core.arch.model import Attention, KVLayout, ModelArch, MoEArch, MTPArch
from mtpserve.core.arch.rope import YarnArch
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mixers.mla import MLA
from mtpserve.layers.mixers.sparse import SparseMLA
from mtpserve.layers.mtp_modules import decoder
from mtpserve.layers.rope import yarn_mscale
from mtpserve.models.family import (
    Family,
    Names,
    ends,
    experts as routed,
    feed_forward,
    gated,
    one_layer,
    trunk_layers,
)
from mtpserve.weights.checkpoint import hf
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Rule, Stack


def arch(config: HFConfig, mtp_layers: int, family: str = "deepseek", dense: int = 0) -> ModelArch:
    """`dense`: see experts."""
    heads, rank = (
        config.get_int("num_attention_heads", at_least=1),
        config.get_int("kv_lora_rank", at_least=1),
    )
    mla = MLAArch(
        q_rank=config.get_int("q_lora_rank", None, at_least=1),
        kv_rank=rank,
        nope=config.get_int("qk_nope_head_dim", at_least=1),
        rope=config.get_int("qk_rope_head_dim", at_least=2),
        value=config.get_int("v_head_dim", at_least=1),
    )
    interleaved = config.get_bool("rope_interleave", True)
    rope = hf.rope(config, mla.rope, interleaved, mscale_alone=True)
    if config.get_bool("attention_bias", False):
        raise config.unsupported("attention_bias", "false")
    hf.quantization(config)
    vocab = config.get_int("vocab_size", at_least=2)
    # YaRN multiplies query and key by its gain.
    sharpen = (
        yarn_mscale(rope.scaling.factor, rope.scaling.mscale_all_dim)
        if isinstance(rope.scaling, YarnArch) and rope.scaling.mscale_all_dim
        else 1.0
    )
    return ModelArch(
        family=family,
        layers=(Attention(KVLayout("mla", 1, rank + mla.rope, rank)),)
        * (config.get_int("num_hidden_layers", at_least=1) + mtp_layers),
        hidden=config.get_int("hidden_size", at_least=1),
        vocab=vocab,
        heads=heads,
        head_dim=mla.nope + mla.rope,
        intermediate=config.get_int("intermediate_size", at_least=1),
        rope=rope,
        norm_eps=config.get_float("rms_norm_eps", 1e-6, above=0),
        scale=(mla.nope + mla.rope) ** -0.5 * sharpen**2,
        max_positions=config.get_int("max_position_embeddings", 4096, at_least=2),
        tied_head=config.get_bool("tie_word_embeddings", False),
        eos_ids=hf.eos_ids(config, vocab),
        dtype=hf.dtype(config),
        mla=mla,
        moe=experts(config, dense),
        mtp=MTPArch(mtp_layers, "embedding-hidden", hidden_in="post", recycle="post") if mtp_layers else None,
    )


def experts(config: HFConfig, dense: int = 0) -> MoEArch | None:
    """`dense`: the first layers have no experts, where the config does not say."""
    number = config.get_int("n_routed_experts", None, at_least=1)
    if number is None:
        return None
    config.get_str("scoring_func", "sigmoid", one_of=("sigmoid",))
    config.get_str("topk_method", "noaux_tc", one_of=("noaux_tc",))
    groups = config.get_int("n_group", 1, at_least=1) or 1
    config.require(number % groups == 0, "n_group", f"a divisor of n_routed_experts = {number}")
    top_groups = config.get_int("topk_group", 1, at_least=1) or 1
    config.require(top_groups <= groups, "topk_group", f"at most n_group = {groups}")
    config.require(
        top_groups == groups or number // groups >= 2, "n_group", "such that a group has at least 2 experts"
    )
    top_k = config.get_int("num_experts_per_tok", at_least=1)
    config.require(
        top_k <= number // groups * top_groups,
        "num_experts_per_tok",
        "at most the experts of the chosen groups",
    )
    size = config.get_int("moe_intermediate_size", at_least=1)
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=size,
        shared=size * config.get_int("n_shared_experts", 0, at_least=0),
        dense=dense_layers(config, dense),
        groups=groups,
        top_groups=top_groups,
        scale=config.get_float("routed_scaling_factor", 1.0),
        renormalise=config.get_bool("norm_topk_prob", True),
    )


def dense_layers(config: HFConfig, first: int) -> tuple[int, ...]:
    """Returns the dense layers of `mlp_layer_types`, or `first_k_dense_replace`; otherwise the `first`
    ones."""
    layers, types = config.get_int("num_hidden_layers", at_least=1), config.raw("mlp_layer_types")
    if types is None:
        # The MTP layer's number is the first after the trunk's.
        return tuple(range(min(config.get_int("first_k_dense_replace", first, at_least=0), layers + 1)))
    is_valid = isinstance(types, list) and len(types) == layers and set(types) <= {"dense", "sparse"}
    config.require(
        is_valid, "mlp_layer_types", f"a list of num_hidden_layers = {layers} names, each one dense or sparse"
    )
    return tuple(layer for layer, name in enumerate(types) if name == "dense")


def build(
    arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels
) -> DecoderModel:
    def block(layer: int) -> tuple[nn.Module, nn.Module]:
        method, kind = methods.of(drafts=layer >= arch.num_layers), arch.attention(layer)
        attention = (
            MLA(arch, method, kernels) if kind.selected is None else SparseMLA(arch, kind, method, kernels)
        )
        return attention, feed_forward(arch, layer, method, kernels)

    return decoder(arch, block, methods, dtype, positions, kernels)


def layer_names(arch: ModelArch) -> Names:
    return attention_names(arch) + gated("mlp", "mlp") + (routed(arch.moe) if arch.moe is not None else [])


def attention_names(arch: ModelArch, block: str = "") -> Names:
    """Returns the names of the attention's tensors and of a layer's norms. `block`: a pattern of what follows
    the names of the modules in which a layer has several."""
    assert arch.mla is not None
    attention: Names = [
        (r"kv_a_proj_with_mqa\.weight", "down.weight", Stack(1)),
        (r"kv_a_layernorm\.weight", "kv_norm.weight", Copy(times=arch.mla.latent_scale)),
        (r"kv_b_proj\.weight", "kv_up", Copy()),
        (r"o_proj\.weight", "out.weight", Copy()),
    ]
    if arch.mla.q_rank is None:
        attention += [(r"q_proj\.weight", "down.weight", Stack(0))]
    else:
        attention += [
            (r"q_a_proj\.weight", "down.weight", Stack(0)),
            (r"q_a_layernorm\.weight", "q_norm.weight", Copy()),
            (r"q_b_proj\.weight", "q_up.weight", Copy()),
        ]
    return [
        (rf"input_layernorm{block}\.weight", "attention_norm.weight", Copy()),
        (rf"post_attention_layernorm{block}\.weight", "mlp_norm.weight", Copy()),
        *((rf"self_attn{block}\.{name}", f"attention.{target}", how) for name, target, how in attention),
    ]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    return ends(arch) + trunk_layers(arch, layer_names(arch))


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return mtp_layer(prefix, layer_names(arch))


def mtp_layer(prefix: str, names: Names, norm: str = r"shared_head\.norm") -> list[Rule]:
    """An MTP layer whose decoder layer has these names, also in other families. `norm`: its final norm's."""
    return one_layer(prefix, "mtp_head.layer.", names) + one_layer(
        prefix,
        "mtp_head.",
        [
            (r"enorm\.weight", "fusion.embedding_norm.weight", Copy()),
            (r"hnorm\.weight", "fusion.hidden_norm.weight", Copy()),
            (r"eh_proj\.weight", "fusion.project.weight", Copy()),
            (norm + r"\.weight", "norm.weight", Copy()),
            (r"embed_tokens\.weight", "", Drop("a copy of the trunk's embedding")),
            (r"shared_head\.head\.weight", "", Drop("a copy of the trunk's head")),
        ],
    )


# 85 to 90 %: DeepSeek-V3, https://arxiv.org/abs/2412.19437 §5.4.3. R1 and V3.1 reason, V3 does not.
DEEPSEEK = Family(arch, build, trunk_rules, mtp_rules, floor=0.4, tool_call_parser="deepseek_v3")
