"""DeepSeek-V3.2: DeepSeek-V3 whose layers attend to the tokens that an indexer selects, the MTP layer too.

https://arxiv.org/abs/2512.02556 §2.1 and its published code. The indexer rotates halves, the attention
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtpserve.core.arch.latent import IndexerArch
from mtpserve.core.arch.model import Attention, ModelArch, Selected
from mtpserve.models import deepseek
from mtpserve.models.family import Family, Names, trunk_layers
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Rule

INDEXER: Names = [
    (r"self_attn\.indexer\.wq_b\.weight", "attention.indexer.q_up.weight", Copy()),
    (r"self_attn\.indexer\.wk\.weight", "attention.indexer.key.weight", Copy()),
    (r"self_attn\.indexer\.k_norm\.(?P<part>weight|bias)", "attention.indexer.key_norm.{part}", Copy()),
    (r"self_attn\.indexer\.weights_proj\.weight", "attention.indexer.weigh.weight", Copy()),
]
SHARED: Names = [
    (r"self_attn\.indexer\..+", "", Drop("the layer takes the tokens that another one has selected"))
]


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    layers = config.get_int("num_hidden_layers", at_least=1)
    return selecting(config, mtp_layers, "deepseek_v32", [True] * layers, interleaved=False)


def selecting(
    config: HFConfig, mtp_layers: int, family: str, indexed: Sequence[bool], interleaved: bool
) -> ModelArch:
    """`indexed`: which layers of the trunk have an indexer; the others take the tokens that the last one
    before them has selected. `interleaved`: the indexer's rotation, where the config does not say."""
    base = deepseek.arch(config, mtp_layers, family, dense=3)
    config.get_int("q_lora_rank", at_least=1)
    assert base.mla is not None
    dim = config.get_int("index_head_dim", 128, at_least=base.mla.rope)
    best = config.get_int("index_topk", 2048, at_least=1)
    indexer_kind, other = (
        Attention(base.attention(0).kv, selected=Selected(best, size)) for size in (dim, 0)
    )
    return replace(
        base,
        layers=(
            *(indexer_kind if has_indexer else other for has_indexer in indexed),
            *(indexer_kind,) * mtp_layers,
        ),
        indexer=IndexerArch(
            heads=config.get_int("index_n_heads", at_least=1),
            interleaved=config.get_bool("indexer_rope_interleave", interleaved),
        ),
    )


def trunk_rules(arch: ModelArch) -> list[Rule]:
    layers = range(arch.num_layers)
    indexer_layers, other = (
        [layer for layer in layers if bool(arch.attention(layer).index_dim) == indexed]
        for indexed in (True, False)
    )
    return (
        deepseek.trunk_rules(arch)
        + trunk_layers(arch, INDEXER, indexer_layers)
        + (trunk_layers(arch, SHARED, other) if other else [])
    )


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return deepseek.mtp_layer(prefix, deepseek.layer_names(arch) + INDEXER)


DEEPSEEK_V32 = Family(
    arch,
    deepseek.build,
    trunk_rules,
    mtp_rules,
    floor=0.4,
    tool_call_parser="deepseek_v32",
    reasoning_parser="deepseek_v3",
)
