"""DeepSeek-V4, as transformers' model defines it and under the names that it is published with: all layers
see a window of a few tokens, and most of them entries besides it that stand for 4 tokens each, of which an
indexer selects some, or for 128; hyper-connections; experts that the first layers look up by the token. The
MTP layer sees a window alone, and gets each of the trunk's streams."""

from __future__ import annotations

import torch
from torch import nn

from mtpserve.core.arch.gates import ClampedGate
from mtpserve.core.arch.latent import IndexerArch, SharedKVArch
from mtpserve.core.arch.model import (
    Attention,
    Compressed,
    KVLayout,
    LayerKind,
    ModelArch,
    MoEArch,
    MTPArch,
    Selected,
)
from mtpserve.core.arch.rope import RopeArch
from mtpserve.core.arch.streams import StreamsArch
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mixers.shared_kv import SharedKV
from mtpserve.layers.moe import TokenMoE
from mtpserve.layers.mtp_modules import decoder
from mtpserve.models.family import Family, Names, one_layer, trunk_layers
from mtpserve.weights.checkpoint import hf
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Expert, Rule, Stack

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}  # tokens of an entry
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # in older configs
HASH, CHOICE = "hash_moe", "moe"
MODEL = r"(?:model\.)?"  # transformers saves published names with this prefix
HASHED = 3  # layers, where the config does not say


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    for name in ("attention_bias", "mlp_bias"):
        if config.get_bool(name, False):
            raise config.unsupported(name, "false")
    if config.get_int("num_key_value_heads", 1) != 1:
        raise config.unsupported("num_key_value_heads", "1")
    config.get_str("hidden_act", "silu", one_of=("silu",))
    hf.quantization(config)
    heads, dim = (
        config.get_int("num_attention_heads", at_least=1),
        config.get_int("head_dim", 512, at_least=2),
    )
    compress, main = ropes(config, dim)
    vocab, groups = config.get_int("vocab_size", at_least=2), config.get_int("o_groups", 8, at_least=1)
    config.require(heads % groups == 0, "o_groups", f"a divisor of num_attention_heads = {heads}")
    size = config.get_int("moe_intermediate_size", at_least=1)
    return ModelArch(
        family="deepseek_v4",
        layers=(*kinds(config, dim, compress.dim), *(sliding(config, dim),) * mtp_layers),
        hidden=config.get_int("hidden_size", at_least=1),
        vocab=vocab,
        heads=heads,
        head_dim=dim,
        intermediate=size,
        rope=compress,
        norm_eps=config.get_float("rms_norm_eps", 1e-6, above=0),
        scale=dim**-0.5,
        max_positions=config.get_int("max_position_embeddings", 1048576, at_least=2),
        tied_head=config.get_bool("tie_word_embeddings", False),
        eos_ids=hf.eos_ids(config, vocab),
        dtype=hf.dtype(config),
        shared_kv=SharedKVArch(
            config.get_int("q_lora_rank", at_least=1), groups, config.get_int("o_lora_rank", at_least=1)
        ),
        indexer=IndexerArch(config.get_int("index_n_heads", 64, at_least=1), interleaved=True),
        moe=experts(config, size),
        mtp=MTPArch(mtp_layers, "sum", hidden_in="pre", recycle="pre") if mtp_layers else None,
        streams=StreamsArch(
            config.get_int("hc_mult", 4, at_least=1),
            config.get_int("hc_sinkhorn_iters", 20, at_least=1),
            config.get_float("hc_eps", 1e-6, above=0),
        ),
        window_rope=main,
        sinks="all",
    )


def ropes(config: HFConfig, dim: int) -> tuple[RopeArch, RopeArch]:
    """Returns the rotation of layers with entries, and of layers with a window alone, which is never
    scaled."""
    rotated = config.get_int("qk_rope_head_dim", None, at_least=2)
    part = 64 / 512 if rotated is None else rotated / dim
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    section = config.section(name).values
    if {"main", "compress"} <= section.keys():
        both = section["compress"], section["main"]
    else:
        scaled = {key: value for key, value in section.items() if key != "rope_theta"}
        both = (
            scaled | {"rope_theta": config.get_float("compress_rope_theta", 160000.0, above=0)},
            {"rope_theta": section.get("rope_theta", config.get_float("rope_theta", 10000.0, above=0))},
        )
    rope_archs = []
    for numbers in both:
        if "yarn" in (numbers.get("rope_type"), numbers.get("type")):
            # the published code multiplies cos and sin by nothing
            numbers = {"attention_factor": 1.0} | numbers
        rope_config = HFConfig(config.path, config.values | {"rope_parameters": numbers}, config.prefix)
        rope_archs.append(hf.rope(rope_config, dim, interleaved=True, part=part))
    return rope_archs[0], rope_archs[1]


def sliding(config: HFConfig, dim: int) -> Attention:
    return Attention(KVLayout("mla", 1, dim, dim), config.get_int("sliding_window", 128, at_least=1))


def kinds(config: HFConfig, dim: int, rotated: int) -> list[LayerKind]:
    """Returns the kinds that `layer_types` names, or `compress_ratios` in older configs."""
    layers, ratios = config.get_int("num_hidden_layers", at_least=1), config.raw("compress_ratios")
    usual = [HEAVY, HEAVY, *(SPARSE if i % 2 else HEAVY for i in range(layers - 2))][:layers]
    if config.has("layer_types") or ratios is None:
        types = names_of(config, "layer_types", (SLIDING, SPARSE, HEAVY), usual)
    else:
        is_valid = isinstance(ratios, list) and len(ratios) >= layers and set(ratios) <= RATIOS.keys()
        config.require(
            is_valid,
            "compress_ratios",
            f"a list of at least num_hidden_layers = {layers} numbers, each one 0, 4 or 128",
        )
        types = [RATIOS[ratio] for ratio in ratios[:layers]]
    rates = {name: rate(config, name) for name in (SPARSE, HEAVY)}
    plain = sliding(config, dim)
    best = Selected(
        config.get_int("index_topk", 512, at_least=1), config.get_int("index_head_dim", 128, at_least=rotated)
    )
    by_name = {
        SLIDING: plain,
        SPARSE: Attention(
            plain.kv, plain.window, compressed=Compressed(rates[SPARSE], overlap=True, selected=best)
        ),
        HEAVY: Attention(plain.kv, plain.window, compressed=Compressed(rates[HEAVY])),
    }
    return [by_name[name] for name in types]


def rate(config: HFConfig, name: str) -> int:
    older = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}[name]
    default = config.get_int(older, RATES[name], at_least=1)
    return config.section("compress_rates").get_int(name, default, at_least=1)


def names_of(config: HFConfig, key: str, choices: tuple[str, ...], default: list[str]) -> list[str]:
    """A name for each layer of the trunk."""
    names, layers = config.raw(key), config.get_int("num_hidden_layers", at_least=1)
    good = names is None or (isinstance(names, list) and len(names) == layers and set(names) <= set(choices))
    config.require(
        good, key, f"a list of num_hidden_layers = {layers} names, each one of {', '.join(choices)}"
    )
    return default if names is None else list(names)


def experts(config: HFConfig, size: int) -> MoEArch:
    layers, number = (
        config.get_int("num_hidden_layers", at_least=1),
        config.get_int("n_routed_experts", at_least=1),
    )
    top_k = config.get_int("num_experts_per_tok", at_least=1)
    config.require(top_k <= number, "num_experts_per_tok", f"at most n_routed_experts = {number}")
    if config.get_int("n_shared_experts", 1) != 1:
        raise config.unsupported("n_shared_experts", "1")
    if not config.get_bool("norm_topk_prob", True):
        raise config.unsupported("norm_topk_prob", "true")
    hashed = config.get_int("num_hash_layers", HASHED, at_least=0)
    types = names_of(
        config, "mlp_layer_types", (HASH, CHOICE), [HASH if i < hashed else CHOICE for i in range(layers)]
    )
    scores = config.get_str("scoring_func", "sqrtsoftplus", one_of=("sqrtsoftplus", "sigmoid"))
    limit = config.get_float("swiglu_limit", 10.0, above=0)
    gate = ClampedGate(1.0, limit, limit, plus=0.0)
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=size,
        shared=size,
        dense=(),
        groups=1,
        top_groups=1,
        scale=config.get_float("routed_scaling_factor", 1.5),
        renormalise=True,
        scores="sigmoid" if scores == "sigmoid" else "sqrtsoftplus",
        gate=gate,
        beside=gate,
        by_token=tuple(layer for layer, name in enumerate(types) if name == HASH),
    )


def build(
    arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels
) -> DecoderModel:
    assert arch.moe is not None
    moe = arch.moe

    def block(layer: int) -> tuple[nn.Module, nn.Module]:
        method = methods.of(drafts=layer >= arch.num_layers)
        tokens = arch.vocab if layer in moe.by_token else 0
        return SharedKV(arch, arch.attention(layer), method, kernels), TokenMoE(
            arch.hidden, moe, layer, tokens, method, kernels
        )

    return decoder(arch, block, methods, dtype, positions, kernels)


def mixer(name: str, target: str) -> Names:
    return [
        (rf"{name}_fn", f"{target}.mixer.product.weight", Copy()),
        (rf"{name}_base", f"{target}.mixer.base", Copy()),
        (rf"{name}_scale", f"{target}.mixer.scale", Copy()),
    ]


def maker(name: str, target: str) -> Names:
    return [
        (rf"{name}\.wkv\.weight", f"{target}.project.weight", Stack(0)),
        (rf"{name}\.wgate\.weight", f"{target}.project.weight", Stack(1)),
        (rf"{name}\.ape", f"{target}.bias", Copy()),
        (rf"{name}\.norm\.weight", f"{target}.norm.weight", Copy()),
    ]


LAYER: Names = [
    (r"attn_norm\.weight", "attention_norm.weight", Copy()),
    (r"ffn_norm\.weight", "mlp_norm.weight", Copy()),
    *mixer("hc_attn", "attention_norm"),
    *mixer("hc_ffn", "mlp_norm"),
    (r"attn\.wq_a\.weight", "attention.down.weight", Stack(0)),
    (r"attn\.wkv\.weight", "attention.down.weight", Stack(1)),
    (r"attn\.q_norm\.weight", "attention.q_norm.weight", Copy()),
    (r"attn\.wq_b\.weight", "attention.q_up.weight", Copy()),
    (r"attn\.(?:kv_)?norm\.weight", "attention.kv_norm.weight", Copy()),
    (r"attn\.wo_a\.weight", "attention.group_out", Copy()),
    (r"attn\.wo_b\.weight", "attention.out.weight", Copy()),
    (r"attn\.attn_sink", "attention.sinks", Copy()),
    *maker(r"attn\.compressor", "attention.compressor.maker"),
    *maker(r"attn\.indexer\.compressor", "attention.compressor.indexer.maker"),
    (r"attn\.indexer\.wq_b\.weight", "attention.compressor.indexer.q_up.weight", Copy()),
    (r"attn\.indexer\.weights_proj\.weight", "attention.compressor.indexer.weigh.weight", Copy()),
    (r"ffn\.gate\.weight", "mlp.router.weight", Copy()),
    (r"ffn\.gate\.bias", "mlp.router.choice_bias", Copy()),
    (r"ffn\.gate\.tid2eid", "mlp.router.table", Copy()),
    (r"ffn\.experts\.(?P<expert>\d+)\.w1\.weight", "mlp.experts.gate_up", Expert(0)),
    (r"ffn\.experts\.(?P<expert>\d+)\.w3\.weight", "mlp.experts.gate_up", Expert(1)),
    (r"ffn\.experts\.(?P<expert>\d+)\.w2\.weight", "mlp.experts.down", Expert(0)),
    (r"ffn\.shared_experts\.w1\.weight", "mlp.shared.gate_up.weight", Stack(0)),
    (r"ffn\.shared_experts\.w3\.weight", "mlp.shared.gate_up.weight", Stack(1)),
    (r"ffn\.shared_experts\.w2\.weight", "mlp.shared.down.weight", Copy()),
]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    ends: Names = [
        (MODEL + r"embed(?:_tokens)?\.weight", "embed.weight", Copy()),
        (MODEL + r"norm\.weight", "norm.weight", Copy()),
        (r"head\.weight", "head.weight", Drop("tied to the embedding") if arch.tied_head else Copy()),
        *mixer(MODEL + r"(?:hc_head\.)?hc(?:_head)?", "norm"),
    ]
    return one_layer("", "", ends) + trunk_layers(arch, LAYER, model=MODEL)


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return one_layer(prefix, "mtp_head.layer.", LAYER) + one_layer(
        prefix,
        "mtp_head.",
        [
            (r"enorm\.weight", "fusion.embedding_norm.weight", Copy()),
            (r"hnorm\.weight", "fusion.hidden_norm.weight", Copy()),
            (r"e_proj\.weight", "fusion.embedding.weight", Copy()),
            (r"h_proj\.weight", "fusion.stream.weight", Copy()),
            (r"norm\.weight", "norm.weight", Copy()),
            *mixer("hc_head", "norm"),
            (r"emb\.tok_emb\.weight", "", Drop("a copy of the trunk's embedding")),
            (r"head\.weight", "", Drop("a copy of the trunk's head")),
        ],
    )


DEEPSEEK_V4 = Family(
    arch, build, trunk_rules, mtp_rules, tool_call_parser="deepseek_v4", reasoning_parser="deepseek_v3"
)
