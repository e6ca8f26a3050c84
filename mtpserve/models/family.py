"""The interface of a family file, and helpers for weight rules that the trunk's layers and the MTP layer
share."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from mtpserve.core.arch.model import ModelArch, MoEArch
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mlp import MLP
from mtpserve.layers.moe import MoE
from mtpserve.weights.checkpoint import hf
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.layouts import MTPLayout, dummy_layers, remains
from mtpserve.weights.quantised.formats import groups
from mtpserve.weights.rules import Copy, Drop, Expert, How, Rule, Stack

log = logging.getLogger(__name__)
Names = list[tuple[str, str, How]]  # the checkpoint's name inside a layer as a pattern, the parameter's, how


@dataclass(frozen=True, slots=True)
class Family:
    """`arch(config, mtp_layers)`; `build(arch, methods, dtype, positions, kernels)`; `trunk_rules(arch)`;
    `mtp_rules(arch, prefix)`, None for a family that is published without an MTP layer.

    `floor`: share of the first drafts that an MTP layer of this family has accepted at least, on its model's
    own greedy text. About half of what was published: less is a layer that was read or computed wrongly, or
    hardly trained. The default: what any trained one reaches.

    `mtp_apart`: it is published without an MTP layer, and may have one in a checkpoint of its own.

    `modules`: how many MTP layers it is published with, where each depth has one of its own; 0: one is for
    all depths. `uncounted`: how many it has where its config does not count them.

    `tool_call_parser`, `reasoning_parser`: the formats that its models write, by the names of
    text/parsers/registry. Where they differ, a checkpoint's chat template says more than its family
    (server/chat/formats); None: it alone says."""

    arch: Callable[[HFConfig, int], ModelArch]
    build: Callable[[ModelArch, Methods, torch.dtype, int, Kernels], DecoderModel]
    trunk_rules: Callable[[ModelArch], list[Rule]]
    mtp_rules: Callable[[ModelArch, str], list[Rule]] | None = None
    floor: float = 0.2
    mtp_apart: bool = False
    modules: int = 0
    uncounted: int = 0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


def feed_forward(arch: ModelArch, layer: int, method: LinearMethod, kernels: Kernels) -> nn.Module:
    """Builds the feed-forward part of the layer with this number in `arch.layers`: experts, or dense."""
    gates = arch.gates[layer] if arch.gates else None
    if arch.moe is None or layer in arch.moe.dense:
        return MLP(
            arch.hidden, arch.intermediate, method, kernels, arch.gate if gates is None else gates.dense
        )
    moe = arch.moe if gates is None else replace(arch.moe, gate=gates.routed, beside=gates.dense)
    return MoE(arch.hidden, moe, layer, method, kernels)


def trunk_layers(
    arch: ModelArch, names: Names, layers: Iterable[int] | None = None, model: str = r"model\."
) -> list[Rule]:
    """`names` for these layers of the trunk, by default for all, and no other: the next number may be an MTP
    layer. `model`: a pattern."""
    numbers = "|".join(str(i) for i in (range(arch.num_layers) if layers is None else layers))
    start = rf"{model}layers\.(?P<layer>{numbers})\."
    return [rule_of(start + name, f"layers.{{layer}}.{target}", how) for name, target, how in names]


def one_layer(prefix: str, target_prefix: str, names: Names) -> list[Rule]:
    return [rule_of(re.escape(prefix) + name, target_prefix + target, how) for name, target, how in names]


def rule_of(pattern: str, target: str, how: How) -> Rule:
    return Rule(pattern, None if isinstance(how, Drop) else target, how)


def ends(arch: ModelArch) -> list[Rule]:
    """Embedding, final norm and head, whose names are the same in all families."""
    head = (
        Rule(r"lm_head\.weight", None, Drop("tied to the embedding"))
        if arch.tied_head
        else Rule(r"lm_head\.weight", "head.weight", Copy())
    )
    return [
        Rule(r"model\.embed_tokens\.weight", "embed.weight", Copy()),
        Rule(r"model\.norm\.weight", "norm.weight", Copy()),
        head,
    ]


def arch_of(
    family: Family, config: HFConfig, mtp_layers: int, checkpoint: Checkpoint, tokenizer: Path
) -> ModelArch:
    """Returns the architecture by config, tensors and tokenizer. Raises LoadError and UnsupportedModel."""
    arch = as_stored(family, family.arch(config, mtp_layers), checkpoint)
    return replace(arch, eos_ids=hf.all_eos_ids(config, arch.eos_ids, arch.vocab, tokenizer))


def as_stored(family: Family, arch: ModelArch, checkpoint: Checkpoint) -> ModelArch:
    """Returns `arch` with a head of its own if the config ties it to the embedding and the checkpoint has
    both, with other numbers, as in transformers."""
    if not arch.tied_head:
        return arch
    untied = replace(arch, tied_head=False)
    rules = [rule for rule in family.trunk_rules(untied) if rule.target in ("embed.weight", "head.weight")]
    parts = {
        rule.target: group
        for group in groups(checkpoint.tensors)
        for rule in rules
        if re.fullmatch(rule.pattern, group.name)
    }
    if len(parts) < 2:
        return arch
    embed, head = parts["embed.weight"], parts["head.weight"]
    is_plain = len(embed.tensors) == len(head.tensors) == 1
    if is_plain and checkpoint.equal(embed.main, head.main):
        return arch
    log.warning(
        "%s: tie_word_embeddings is true, but %s and %s differ: both are used",
        checkpoint.directory,
        head.main,
        embed.main,
    )
    return untied


def gated(name: str, target: str) -> Names:
    """A gated feed-forward block, whose inner names are the same in all families."""
    return [
        (rf"{name}\.gate_proj\.weight", f"{target}.gate_up.weight", Stack(0)),
        (rf"{name}\.up_proj\.weight", f"{target}.gate_up.weight", Stack(1)),
        (rf"{name}\.down_proj\.weight", f"{target}.down.weight", Copy()),
    ]


def experts(arch: MoEArch, correction: bool = True) -> Names:
    """Routed experts, their router and the shared expert, whose names are the same in most families.
    `correction`: the name of the router's bias is, too."""
    names: Names = [
        (r"mlp\.gate\.weight", "mlp.router.weight", Copy()),
        (r"mlp\.experts\.(?P<expert>\d+)\.gate_proj\.weight", "mlp.experts.gate_up", Expert(0)),
        (r"mlp\.experts\.(?P<expert>\d+)\.up_proj\.weight", "mlp.experts.gate_up", Expert(1)),
        (r"mlp\.experts\.(?P<expert>\d+)\.down_proj\.weight", "mlp.experts.down", Expert(0)),
        *gated(r"mlp\.shared_experts", "mlp.shared"),
    ]
    if arch.router_bias is None or not correction:
        return names
    return [*names, (r"mlp\.gate\.e_score_correction_bias", "mlp.router.bias", Copy())]


def without_mtp(config: HFConfig, layout: MTPLayout | None, layers: int, used: int = 0) -> list[Rule]:
    """Drops all MTP layers' tensors but those of the first `used` ones, and what is left of layers that a
    checkpoint's makers took out. `layers`: of the trunk."""
    patterns = dict.fromkeys(() if layout is None else layout.unused(used), "an MTP layer that is not used")
    patterns |= dict.fromkeys(remains(config, layout, layers), "a part of an MTP layer that is not whole")
    return [Rule(pattern, None, Drop(reason)) for pattern, reason in patterns.items()]


def dummy_layout(family: Family, config: HFConfig) -> MTPLayout | None:
    """Returns the MTP layers of a model without tensors. A config may count some of which the family is
    published without."""
    return None if family.mtp_rules is None else dummy_layers(config, family.modules or family.uncounted)


def dropped(prefix: str, reason: str) -> Rule:
    """Drops all tensors whose names begin with the prefix."""
    return Rule(re.escape(prefix) + r".+", None, Drop(reason))
