"""MiniMax-M2, M2.1, M2.5 and M2.7, by their published configs and transformers' model: grouped-query
attention whose queries and keys are normed over all heads of a row, of each head a part rotated; experts in
all layers, routed as DeepSeek-V3's without groups.

The configs count three MTP modules, and no checkpoint has one: heads of EAGLE-3 are published instead.
"""

from __future__ import annotations

from dataclasses import replace

from mtpserve.core.arch.model import ModelArch, MoEArch
from mtpserve.models import gqa
from mtpserve.models.family import Family, Names, ends, trunk_layers
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Expert, Rule


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    config.get_str("qk_norm_type", "per_layer", one_of=("per_layer",))
    config.get_str("scoring_func", "sigmoid", one_of=("sigmoid",))
    for name in ("use_qk_norm", "use_routing_bias"):
        if not config.get_bool(name, True):
            raise config.unsupported(name, "true")
    if config.get_int("shared_intermediate_size", 0):
        raise config.unsupported("shared_intermediate_size", "0")
    kinds = config.raw("attn_type_list")
    if kinds is not None and set(kinds) != {1}:
        raise config.unsupported("attn_type_list", "1 for each layer, which is full attention")
    head_dim = config.get_int("head_dim", at_least=2)
    rotary_dim = config.get_int("rotary_dim", head_dim, at_least=2)
    config.require(
        rotary_dim <= head_dim and rotary_dim % 2 == 0,
        "rotary_dim",
        f"an even number up to head_dim = {head_dim}",
    )
    part, moe = rotary_dim / head_dim, experts(config)
    of_heads = gqa.arch(config, "minimax_m2", positions=196608, rotated=part, moe=moe)
    return replace(of_heads, row_norms=True)


def experts(config: HFConfig) -> MoEArch:
    number = config.get_int("num_local_experts", at_least=1)
    top_k = config.get_int("num_experts_per_tok", at_least=1)
    config.require(top_k <= number, "num_experts_per_tok", f"at most num_local_experts = {number}")
    size = config.get_int("intermediate_size", at_least=1)
    return MoEArch(number, top_k, size, 0, (), groups=1, top_groups=1, scale=1.0, renormalise=True)


def trunk_rules(arch: ModelArch) -> list[Rule]:
    block = r"block_sparse_moe\."
    names: Names = [
        *gqa.attention_names(arch),
        *((rf"self_attn\.{part}_norm\.weight", f"attention.row_norms.{part}", Copy()) for part in "qk"),
        (block + r"gate\.weight", "mlp.router.weight", Copy()),
        (block + r"e_score_correction_bias", "mlp.router.bias", Copy()),
        (block + r"experts\.(?P<expert>\d+)\.w1\.weight", "mlp.experts.gate_up", Expert(0)),
        (block + r"experts\.(?P<expert>\d+)\.w3\.weight", "mlp.experts.gate_up", Expert(1)),
        (block + r"experts\.(?P<expert>\d+)\.w2\.weight", "mlp.experts.down", Expert(0)),
    ]
    return ends(arch) + trunk_layers(arch, names)


MINIMAX_M2 = Family(
    arch, gqa.build, trunk_rules, tool_call_parser="minimax_m2", reasoning_parser="minimax_m2"
)
