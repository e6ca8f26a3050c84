"""Embeds a small checkpoint in a larger one that computes the same function: the larger model's cost, the small one's text and acceptance.

    python benchmarks/common/inflate.py SMALL OUT --shape 258m
    python benchmarks/common/inflate.py mtpserve/demo OUT --layers 12 --hidden 1024 --heads 8 --experts 64 --experts-per-token 8

For every architecture that can be loaded with its trunk, the MTP layers included; weights in float8 and the like are to be expanded first.
Of a checkpoint that sees pictures the text model is enlarged.

In the larger model everything that a small one does not have is either zero when it is computed or multiplied by zero, and nothing is
left out by it: all weights are read, all products are made.

    hidden state   c [ the small one's | 0 … 0 ]   so what reads it may have any weights for the padding:    random
                                                   what writes it must write zeros there:                    zero rows
    a norm         the mean of squares is over n times as many numbers: with c = sqrt(n) it is the small one's, and the normed state is
                   c times the small one's, too. So what writes the hidden state, the embedding among it, is multiplied by c, and what
                   reads it, the head among it, is divided by c: exact for n a power of 4, otherwise all is stored in float32. Norms and
                   their epsilon stay as they are. A tied head becomes a matrix of its own
    further heads, further inner rows, further layers
                   their values and their up projection (their gate where gpt-oss adds 1 to that) read the padding alone, so that they
                   are 0: queries, keys, gates, and what o_proj and down_proj multiply by these zeros, are random. Values of latent
                   attention have zero rows. Delta-nets read the padding alone in further layers
    further tokens their rows of the head are means of two others, which never have the largest logit

Dimensions of a head, the ranks of latent attention, heads of delta-nets and of indexers stay as they are.

Experts are cloned. With r times the experts per token each expert has r clones that are always chosen together and share its weight: their
logits are equal (what their rows of the router multiply in the padding is random), and either the weights are divided by their sum, as they
are by a softmax over all, or the factor for all of them is divided by r. Where the router first chooses among groups by their two best
experts, each clone is in a copy of its group, and r times as many groups are chosen, so that a copy's two best are the group's. All experts
beyond those are spare: clones with other rows of the router, and a bias with which they are never chosen (where the router has one that
decides alone). They take memory, and time where all experts are multiplied. In a further layer the router is random.

Only zeros in the activations tell the two apart, which no dense product notices. Texts are equal where sums of equal numbers are, in
whatever order: always in exact arithmetic, and in float32 but for ties within rounding. On a CPU the draft head of a large model is int8
by default, and a small one's is not: --speculative-draft-model-quantization none (or int8) makes the acceptance of both the same.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.widened import Widener
from mtpserve.core.arch.model import ModelArch, MoEArch
from mtpserve.core.errors import MTPServeError
from mtpserve.models.family import Family
from mtpserve.models.registry import family_of
from mtpserve.weights.checkpoint.checkpoint import INDEX, Checkpoint
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.layouts import MTPLayout, mtp_layers

FLOATS = "BF16", "F16", "F32"
COPIED = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"
SHARD = 4 << 30  # bytes of one file


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model can grow. Numbers that it does not have are 0."""

    layers: int  # without the MTP layer
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        numbers = {name: next((config[key] for key in keys if config.get(key)), 0) for name, keys in keys_of(config).items()}
        return cls(**numbers | {"kv_heads": numbers["kv_heads"] or numbers["heads"]})


# Names in config.json, by families. Further ones of the same line are multiplied with the first.
KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "inner": ("intermediate_size",),
    "heads": ("num_attention_heads", "swa_num_attention_heads"),
    "kv_heads": ("num_key_value_heads", "swa_num_key_value_heads"),
    "vocab": ("vocab_size",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k"),
    "expert_inner": ("moe_intermediate_size",),
}
# Of the trunk's layers: which kinds there are is repeated, and what comes last goes on.
REPEATED, LASTING = ("layer_types", "hybrid_layer_pattern"), ("moe_layer_freq", "mlp_layer_types", "indexer_types", "index_topk_pattern")
SHAPES = {"258m": Shape(16, 1024, 2816, 16, 8, 27008), "500m": Shape(28, 1024, 3072, 16, 8, 65024)}


def keys_of(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    # gpt-oss has no dense layers, and calls the experts' size by the name of theirs.
    return KEYS | ({"inner": (), "expert_inner": ("intermediate_size",)} if "num_local_experts" in config else {})


@dataclass(frozen=True, slots=True)
class Small:
    config: HFConfig  # the text model's
    family: Family
    checkpoint: Checkpoint
    layout: MTPLayout | None

    def arch(self, config: dict[str, Any]) -> ModelArch:
        """Of this model with another config."""
        return self.family.arch(HFConfig(self.config.path, config), self.layout.count if self.layout else 0)


def check(small: Shape, large: Shape, moe: MoEArch | None = None) -> None:
    """One line for whatever cannot be."""
    for each in fields(Shape):
        least, got = getattr(small, each.name), getattr(large, each.name)
        option = f"--{each.name.replace('_', '-')}"
        if not least and got:
            raise SystemExit(f"{option} {got}: the model has no {'experts' if each.name.startswith('expert') else each.name}")
        if got < least:
            raise SystemExit(f"{option} must be at least the small model's {least}, got {got}")
    if large == small:
        raise SystemExit("nothing would be larger: give --layers, --hidden, --inner, --heads, --vocab, --experts or --shape")
    if large.heads * small.kv_heads != small.heads * large.kv_heads:
        raise SystemExit(
            f"{large.heads} heads over {large.kv_heads} are not grouped as {small.heads} over {small.kv_heads}: see --kv-heads"
        )
    if moe is not None:
        check_experts(small, large, moe)


def groups_of(moe: MoEArch) -> int:
    """1 where the router chooses all groups."""
    return moe.groups if moe.top_groups < moe.groups else 1


def check_experts(small: Shape, large: Shape, moe: MoEArch) -> None:
    copies, rest = divmod(large.experts_per_token, small.experts_per_token)
    groups = groups_of(moe)
    if rest:
        raise SystemExit(f"--experts-per-token must be a multiple of {small.experts_per_token}, got {large.experts_per_token}")
    if large.experts < copies * small.experts:
        raise SystemExit(f"--experts must be at least {copies * small.experts}, {copies} clones of each, got {large.experts}")
    unbiased = moe.router_bias is None or (moe.router_bias, moe.scores) == ("choice", "softmax")
    if unbiased and large.experts > copies * small.experts:
        exactly = f"{copies * small.experts}, {copies} clones of each"
        raise SystemExit(f"--experts must be {exactly}, got {large.experts}: no bias keeps this router from further ones")
    if large.experts % (groups * copies if groups > 1 else 1):
        raise SystemExit(f"--experts must be a multiple of {groups * copies}, the number of groups, got {large.experts}")


def enlarged(config: dict[str, Any], shape: Shape, arch: ModelArch, exact: bool) -> dict[str, Any]:
    """The large model's config. `exact`: numbers in 16 bits stay so."""
    small, made = Shape.of(config), dict(config)
    for name, keys in keys_of(config).items():
        before, after = getattr(small, name), getattr(shape, name)
        for key in filter(config.get, keys):
            made[key], rest = divmod(config[key] * after, before)
            if rest:
                raise SystemExit(f"{key} = {config[key]} cannot grow as another key does, from {before} to {after}")
    further = shape.layers - small.layers
    for key in (*REPEATED, *LASTING):
        if isinstance(given := config.get(key), list | str):
            more = [given[i % len(given)] if key in REPEATED else given[-1] for i in range(len(given), len(given) + further)]
            made[key] = given + "".join(more) if isinstance(given, str) else [*given, *more]
    if arch.mla is None:
        made["head_dim"] = arch.head_dim
    if shape.hidden > small.hidden:
        made["tie_word_embeddings"] = False
    if not exact:
        made |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    dense = config.get("first_k_dense_replace") or 0
    if small.experts and dense >= small.layers:  # the trunk has no experts, so further layers have none
        made["first_k_dense_replace"] = dense + further
    return made | (routing(config, shape, small, arch.moe) if arch.moe is not None else {})


def routing(config: dict[str, Any], shape: Shape, small: Shape, moe: MoEArch) -> dict[str, Any]:
    copies, made = shape.experts_per_token // small.experts_per_token, dict[str, Any]()
    if groups_of(moe) == 1:
        made |= {name: 1 for name in ("n_group", "topk_group") if name in config}
    elif copies > 1:
        made |= {name: config[name] * copies for name in ("n_group", "topk_group")}
    if copies > 1 and moe.scores == "sigmoid" and not moe.renormalise:
        made["routed_scaling_factor"] = moe.scale / copies
    return made


def opened(source: Path) -> Small:
    try:
        config, checkpoint = read_config(source), Checkpoint.open(source)
        family = family_of(config)
        layout = mtp_layers(checkpoint.tensors, config.get_int("num_hidden_layers", at_least=1))
    except MTPServeError as error:
        raise SystemExit(str(error)) from None
    name = config.values["architectures"][0]
    if name.endswith("NextN"):
        raise SystemExit(f"{source}: a {name} is an MTP layer without a trunk: enlarge the whole model")
    for tensor, entry in checkpoint.tensors.items():
        if entry.dtype not in FLOATS:
            raise SystemExit(f"{source}: {tensor} is stored as {entry.dtype}: expand it to one of {', '.join(FLOATS)} first")
    text = {key: value for key, value in config.values.items() if key not in ("text_config", "vision_config")}
    text["architectures"] = [name.replace("ForConditionalGeneration", "ForCausalLM")]
    return Small(HFConfig(config.path, text), family, checkpoint, layout if family.mtp_rules is not None else None)


def inflate(source: Path, out: Path, shape: Shape) -> int:
    """→ the number of parameters."""
    small = opened(source)
    config = small.config.values
    try:
        arch = small.arch(config)
        check(Shape.of(config), shape, arch.moe)
        rules, mtp_rules = small.family.trunk_rules(arch), small.family.mtp_rules
        if small.layout is not None and mtp_rules is not None:
            rules += [rule for prefix in small.layout.prefixes for rule in mtp_rules(arch, prefix)]
        exact = arch.dtype == "float32" or Widener.holds(arch.hidden, shape.hidden)
        made = enlarged(config, shape, arch, exact)
        widener = Widener(arch, small.arch(made), small.checkpoint.tensors, rules, small.checkpoint.tensor)
    except MTPServeError as error:
        raise SystemExit(str(error)) from None
    if not exact:
        print("the width is not a power of 4 times the small one's: all is written in float32", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    if there := next(out.glob("model*.safetensors"), None):
        raise SystemExit(f"{there} is there already")
    parameters = write(out, widener.tensors())
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    (out / "config.json").write_text(json.dumps(made, indent=2) + "\n")
    return parameters


def write(out: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """One file, or several and their index. → the number of parameters."""
    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    count = size = 0

    def flush() -> None:
        save_file(shard, out / f"part-{len(files)}.safetensors")
        files.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        count, size = count + tensor.numel(), size + tensor.nbytes
        if size >= SHARD * (len(files) + 1):
            flush()
    if shard:
        flush()
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] if len(files) > 1 else ["model.safetensors"]
    for i, name in enumerate(names):
        (out / f"part-{i}.safetensors").rename(out / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, inside in zip(names, files, strict=True) for tensor in inside}
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n")
    return count


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", type=Path, metavar="SMALL")
    made.add_argument("out", type=Path, metavar="OUT")
    made.add_argument("--shape", choices=list(SHAPES), help="all numbers at once, for the model of trained.py")
    for each in fields(Shape):
        made.add_argument(f"--{each.name.replace('_', '-')}", type=int, metavar="N", help=f"{KEYS[each.name][0]} (default: SMALL's)")
    return made


def shape_of(args: argparse.Namespace, small: Shape) -> Shape:
    given = {each.name: value for each in fields(Shape) if (value := getattr(args, each.name)) is not None}
    if args.shape is not None:
        if given:
            raise SystemExit("--shape says everything: give it alone")
        return SHAPES[args.shape]
    shape = replace(small, **given)
    if "heads" in given and "kv_heads" not in given:  # as many queries share a key as in the small model
        shape = replace(shape, kv_heads=shape.heads * small.kv_heads // small.heads)
    return shape


def main() -> None:
    args = parser().parse_args()
    shape = shape_of(args, Shape.of(opened(args.source).config.values))
    print(f"{inflate(args.source, args.out, shape) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
