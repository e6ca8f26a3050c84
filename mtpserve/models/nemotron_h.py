"""Nemotron-H, and Nemotron 3 Nano and Super: each layer is one block, Mamba-2, attention, experts, or a
feed-forward block without them, in the order that the config gives. Heads are not rotated, feed-forward
blocks have no gate (https://arxiv.org/abs/2504.03624, https://arxiv.org/abs/2512.20848). The MTP layer
attends and then has experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mtpserve.core.arch.model import Attention, FeedForward, LayerKind, ModelArch, MoEArch, MTPArch, Recurrent
from mtpserve.core.arch.rope import RopeArch
from mtpserve.layers.decoder import Blocks, DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mixers.mamba2 import Mamba2
from mtpserve.layers.mtp_modules import decoder
from mtpserve.models import deepseek, gqa
from mtpserve.models.family import Family, Names, feed_forward, one_layer, rule_of, trunk_layers
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Expert, Rule, Stack

MAMBA, ATTENTION, MOE, DENSE = "M", "*", "E", "-"  # in a pattern, one letter for each layer
BLOCKS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "moe": MOE,
    "mlp": DENSE,
}
FALSE = ("attention_bias", "use_bias", "mlp_bias", "mamba_proj_bias")
MLP_NORM: Names = [(r"norm\.weight", "mlp_norm.weight", Copy())]
LIMITLESS = {"__float__": "Infinity"}  # as transformers writes it


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    for name in FALSE:
        if config.get_bool(name, False):
            raise config.unsupported(name, "false")
    if config.has("sliding_window"):
        raise config.unsupported("sliding_window", "null")
    config.get_str("mlp_hidden_act", "relu2", one_of=("relu2",))
    config.get_str("mamba_hidden_act", "silu", one_of=("silu",))
    blocks = pattern(config, "hybrid_override_pattern", "layers_block_type")
    layers = config.get_int("num_hidden_layers", at_least=1)
    config.require(len(blocks) == layers, "num_hidden_layers", f"as many as there are blocks, {len(blocks)}")
    if (
        mtp_layers
        and (
            mtp_blocks := pattern(
                config, "mtp_hybrid_override_pattern", "mtp_layers_block_type", ATTENTION + MOE
            )
        )
        != ATTENTION + MOE
    ):
        name = (
            "mtp_hybrid_override_pattern"
            if config.has("mtp_hybrid_override_pattern")
            else "mtp_layers_block_type"
        )
        raise config.unsupported(name, f'attention and experts ("{ATTENTION}{MOE}"), not "{mtp_blocks}"')
    moe = experts(config, blocks) if MOE in blocks or mtp_layers else None
    config = config.with_default("intermediate_size", moe.size) if moe is not None else config
    mtp = MTPArch(mtp_layers, "embedding-hidden", hidden_in="post", recycle="post") if mtp_layers else None
    eps = config.get_float("layer_norm_epsilon", 1e-5, above=0)
    config = config.with_default("head_dim", 128)
    common = gqa.arch(config, "nemotron_h", positions=4096, eps=eps, moe=moe, mtp=mtp)
    attending, mamba = common.layers[0], recurrent(config)
    kinds: dict[str, LayerKind] = {
        MAMBA: mamba,
        ATTENTION: attending,
        MOE: FeedForward(),
        DENSE: FeedForward(),
    }
    none = RopeArch(0, common.rope.theta, interleaved=False)
    return replace(
        common, layers=(*(kinds[block] for block in blocks), *common.layers[layers:]), rope=none, gate="relu2"
    )  # fmt: skip


def pattern(config: HFConfig, name: str, listed: str, default: str | None = None) -> str:
    """A letter for each layer: from the key `name`, or from the names in the list `listed`. With a default:
    not of a trunk."""
    blocks: str
    if not config.has(name) and config.has(listed):
        name, names = listed, config.raw(listed)
        is_valid = isinstance(names, list) and all(
            isinstance(block, str) and block in BLOCKS for block in names
        )
        config.require(is_valid, name, f"a list of names, each one of {', '.join(BLOCKS)}")
        blocks = "".join(BLOCKS[block] for block in names)
    else:
        blocks = config.get_str(name) if default is None else config.get_str(name, default)
        config.require(
            set(blocks) <= {*BLOCKS.values()},
            name,
            f"of the letters {' '.join(dict.fromkeys(BLOCKS.values()))}",
        )
    if default is None:
        config.require(
            ATTENTION in blocks, name, "such that there is attention: pages are those of layers that attend"
        )
    return blocks


def recurrent(config: HFConfig) -> Recurrent:
    if not limitless(config.raw("time_step_limit")):
        raise config.unsupported("time_step_limit", "0 and infinity")
    heads, groups = (
        config.get_int("mamba_num_heads", 128, at_least=1),
        config.get_int("n_groups", 8, at_least=1),
    )
    config.require(heads % groups == 0, "n_groups", f"a divisor of mamba_num_heads = {heads}")
    return Recurrent(
        key_heads=groups,
        value_heads=heads,
        key_dim=config.get_int("ssm_state_size", 128, at_least=1),
        value_dim=config.get_int("mamba_head_dim", 64, at_least=1),
        taps=config.get_int("conv_kernel", 4, at_least=2),
        rule="mamba2",
        conv_bias=config.get_bool("use_conv_bias", True),
    )


def limitless(limit: object) -> bool:
    """None, or from 0 to infinity, which is also written as a large number."""
    match limit:
        case None:
            return True
        case [0 | 0.0, high]:
            return high == LIMITLESS or (isinstance(high, int | float) and high > 1e9)
    return False


def experts(config: HFConfig, blocks: str) -> MoEArch:
    config.get_int("n_routed_experts", at_least=1)
    if config.get_int("n_shared_experts", 1, at_least=0) != 1:
        raise config.unsupported("n_shared_experts", "1")
    moe = deepseek.experts(config)
    assert moe is not None
    return replace(
        moe,
        shared=config.get_int("moe_shared_expert_intermediate_size", at_least=1),
        dense=tuple(number for number, block in enumerate(blocks) if block == DENSE),
        gate="relu2",
        beside="relu2",
        latent=config.get_int("moe_latent_size", 0, at_least=1),
    )


def build(
    arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels
) -> DecoderModel:
    def blocks(layer: int) -> Blocks:
        drafts, kind = layer >= arch.num_layers, arch.layers[layer]
        method = methods.of(drafts)
        match kind:
            case Recurrent():
                return Mamba2(arch, kind, method, kernels), None
            case Attention():
                return GQA(arch, kind, method, kernels), feed_forward(
                    arch, layer, method, kernels
                ) if drafts else None
            case _:
                return None, feed_forward(arch, layer, method, kernels)

    return decoder(arch, blocks, methods, dtype, positions, kernels)


def attention_names() -> Names:
    names: Names = [
        (rf"mixer\.{letter}_proj\.weight", "attention.qkv.weight", Stack(part))
        for part, letter in enumerate("qkv")
    ]
    return [
        *names,
        (r"mixer\.o_proj\.weight", "attention.out.weight", Copy()),
        (r"norm\.weight", "attention_norm.weight", Copy()),
    ]


def mamba_names(kind: Recurrent) -> Names:
    names: Names = [
        (r"norm\.weight", "attention_norm.weight", Copy()),
        (r"mixer\.in_proj\.weight", "attention.inputs.weight", Copy()),
        (r"mixer\.conv1d\.weight", "attention.conv", Copy()),
        (r"mixer\.A_log", "attention.decay", Copy()),
        (r"mixer\.dt_bias", "attention.decay_bias", Copy()),
        (r"mixer\.D", "attention.skip", Copy()),
        (r"mixer\.norm\.weight", "attention.norm", Copy()),
        (r"mixer\.out_proj\.weight", "attention.out.weight", Copy()),
    ]
    return [*names, (r"mixer\.conv1d\.bias", "attention.conv_bias", Copy())] if kind.conv_bias else names


def plain_names(name: str, target: str) -> Names:
    """A feed-forward block without a gate."""
    return [
        (rf"{name}\.up_proj\.weight", f"{target}.gate_up.weight", Copy()),
        (rf"{name}\.down_proj\.weight", f"{target}.down.weight", Copy()),
    ]


def expert_names(moe: MoEArch) -> Names:
    """Each expert's matrices, or all experts' in one tensor."""
    names: Names = [
        (r"mixer\.gate\.weight", "mlp.router.weight", Copy()),
        (r"mixer\.gate\.e_score_correction_bias", "mlp.router.bias", Copy()),
        (r"mixer\.experts\.(?P<expert>\d+)\.up_proj\.weight", "mlp.experts.gate_up", Expert(0)),
        (r"mixer\.experts\.(?P<expert>\d+)\.down_proj\.weight", "mlp.experts.down", Expert(0)),
        (r"mixer\.experts\.up_proj", "mlp.experts.gate_up", Copy()),
        (r"mixer\.experts\.down_proj", "mlp.experts.down", Copy()),
        *plain_names(r"mixer\.shared_experts", "mlp.shared"),
    ]
    if not moe.latent:
        return names
    ends = (("fc1_latent_proj", "latent_in"), ("fc2_latent_proj", "latent_out"))
    return [*names, *((rf"mixer\.{name}\.weight", f"mlp.{target}.weight", Copy()) for name, target in ends)]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    start, dense = r"(?:backbone|model)\.", () if arch.moe is None else arch.moe.dense
    rules = [
        Rule(start + r"embeddings\.weight", "embed.weight", Copy()),
        Rule(start + r"norm_f\.weight", "norm.weight", Copy()),
        rule_of(
            r"lm_head\.weight", "head.weight", Drop("tied to the embedding") if arch.tied_head else Copy()
        ),
    ]
    trunk = arch.layers[: arch.num_layers]
    for kind in dict.fromkeys(trunk):
        layers = [number for number, other in enumerate(trunk) if other == kind]
        match kind:
            case Recurrent():
                rules += trunk_layers(arch, mamba_names(kind), layers, start)
            case Attention():
                rules += trunk_layers(arch, attention_names(), layers, start)
            case FeedForward():
                rules += trunk_layers(arch, MLP_NORM, layers, start)
                if plain := [number for number in layers if arch.moe is None or number in dense]:
                    rules += trunk_layers(arch, plain_names("mixer", "mlp"), plain, start)
                if arch.moe is not None and (routed := [number for number in layers if number not in dense]):
                    rules += trunk_layers(arch, expert_names(arch.moe), routed, start)
    return rules


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    """Its two blocks are numbered like layers: what fuses is in the first, the final norm in the last."""
    assert arch.moe is not None
    first, last = f"{prefix}layers.0.", f"{prefix}layers.1."
    fusing: Names = [
        (r"enorm\.weight", "fusion.embedding_norm.weight", Copy()),
        (r"hnorm\.weight", "fusion.hidden_norm.weight", Copy()),
        (r"eh_proj\.weight", "fusion.project.weight", Copy()),
    ]
    return [
        *one_layer(first, "mtp_head.", fusing),
        *one_layer(first, "mtp_head.layer.", attention_names()),
        *one_layer(last, "mtp_head.layer.", [*expert_names(arch.moe), *MLP_NORM]),
        *one_layer(last, "mtp_head.", [(r"final_layernorm\.weight", "norm.weight", Copy())]),
    ]


NEMOTRON_H = Family(
    arch, build, trunk_rules, mtp_rules, tool_call_parser="qwen3_coder", reasoning_parser="qwen3"
)
