"""Embeds a small checkpoint in a larger one that computes the same function: the larger model's cost, the small one's text and acceptance.

    python benchmarks/common/inflate.py SMALL OUT --shape 258m
    python benchmarks/common/inflate.py mtpserve/demo OUT --layers 12 --hidden 1024 --heads 8 --experts 64 --experts-per-token 8

For MiMo's and DeepSeek-V3's architecture, the MTP layers included; weights in float8 are to be expanded first.

In the larger model everything that a small one does not have is either zero when it is computed or multiplied by zero, and nothing is
left out by it: all weights are read, all products are made.

    hidden state   [ the small one's | 0 … 0 ]   so what reads it may have any weights for the padding:     random
                                                 what writes it must write zeros there:                     zero rows
    a norm         the mean of squares is over n times as many numbers, so that the normed state is sqrt(n) times as large:
                   the weight is divided by sqrt(n), exact for n a power of 4 (otherwise it is stored in float32), and epsilon by n
    further heads, further inner rows, further layers
                   their values and their up projection read the padding alone, so that they are 0: queries, keys, gates, and
                   what o_proj and down_proj multiply by these zeros, are random. Values of latent attention have zero rows
    further tokens their rows of the head are means of two others, which never have the largest logit

Dimensions of a head and the ranks of latent attention stay as they are: the latter's norms have an epsilon of their own, in no config.

Experts are cloned. With r times the experts per token each expert has r clones that are always chosen together and share its weight: their
logits are equal (what their rows of the router multiply in the padding is random), and either the weights are divided by their sum, or the
factor for all of them is divided by r. Where the router first chooses among groups by their two best experts, each clone is in a copy of
its group, and r times as many groups are chosen, so that a copy's two best are the group's. All experts beyond those are spare: clones
with other rows of the router, and a bias with which they are never chosen. They take memory, and time where all experts are multiplied.
In a further layer the router is random.

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
from common.widened import EMBEDDING, Sizes, Widener
from mtpserve.core.errors import LoadError
from mtpserve.weights.checkpoint import INDEX, Checkpoint
from mtpserve.weights.hf import read_config

FAMILIES = "MiMoForCausalLM", "DeepseekV3ForCausalLM"
FLOATS = "BF16", "F16", "F32"
COPIED = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"
SHARD = 4 << 30  # bytes of one file


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model can grow. The experts' numbers are 0 in a model without."""

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
        return cls(*(config.get(key) or (config["num_attention_heads"] if name == "kv_heads" else 0) for name, key in KEYS.items()))


KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "inner": "intermediate_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocab": "vocab_size", "experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok",
    "expert_inner": "moe_intermediate_size",
}  # fmt: skip
SHAPES = {"258m": Shape(16, 1024, 2816, 16, 8, 27008), "500m": Shape(28, 1024, 3072, 16, 8, 65024)}


def check(small: Shape, large: Shape, config: dict[str, Any]) -> None:
    """One line for whatever cannot be."""
    for each in fields(Shape):
        least, got = getattr(small, each.name), getattr(large, each.name)
        option = f"--{each.name.replace('_', '-')}"
        if each.name.startswith("expert") and not small.experts and got:
            raise SystemExit(f"{option} {got}: the model has no experts")
        if got < least:
            raise SystemExit(f"{option} must be at least the small model's {least}, got {got}")
    if large == small:
        raise SystemExit("nothing would be larger: give --layers, --hidden, --inner, --heads, --vocab, --experts or --shape")
    if large.heads * small.kv_heads != small.heads * large.kv_heads:
        raise SystemExit(
            f"{large.heads} heads over {large.kv_heads} are not grouped as {small.heads} over {small.kv_heads}: see --kv-heads"
        )
    if small.experts:
        check_experts(small, large, groups_of(config))


def groups_of(config: dict[str, Any]) -> int:
    """1 where the router chooses all groups."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    return int(groups) if chosen < groups else 1


def check_experts(small: Shape, large: Shape, groups: int) -> None:
    copies, rest = divmod(large.experts_per_token, small.experts_per_token)
    if rest:
        raise SystemExit(f"--experts-per-token must be a multiple of {small.experts_per_token}, got {large.experts_per_token}")
    if large.experts < copies * small.experts:
        raise SystemExit(f"--experts must be at least {copies * small.experts}, {copies} clones of each, got {large.experts}")
    if large.experts % (groups * copies if groups > 1 else 1):
        raise SystemExit(f"--experts must be a multiple of {groups * copies}, the number of groups, got {large.experts}")


def enlarged(config: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """The large model's config."""
    small = Shape.of(config)
    made = config | {key: getattr(shape, name) for name, key in KEYS.items() if config.get(key) is not None}
    made["rms_norm_eps"] = config.get("rms_norm_eps", 1e-6) * small.hidden / shape.hidden
    if "kv_lora_rank" not in config:
        made["head_dim"] = config.get("head_dim") or small.hidden // small.heads
        if types := config.get("layer_types"):
            made["layer_types"] = [*types, *["full_attention"] * (shape.layers - small.layers)]
    dense = config.get("first_k_dense_replace") or 0
    if small.experts and dense >= small.layers:  # the trunk has no experts, so further layers have none
        made["first_k_dense_replace"] = dense + shape.layers - small.layers
    if small.experts and (copies := shape.experts_per_token // small.experts_per_token) > 1:
        if groups_of(config) > 1:
            made |= {name: config[name] * copies for name in ("n_group", "topk_group")}
        if not config.get("norm_topk_prob", True):
            made["routed_scaling_factor"] = config.get("routed_scaling_factor", 1.0) / copies
    if groups_of(config) == 1:
        made |= {name: 1 for name in ("n_group", "topk_group") if name in config}
    return made


def opened(source: Path) -> tuple[dict[str, Any], Checkpoint]:
    try:
        config, checkpoint = read_config(source).values, Checkpoint.open(source)
    except LoadError as error:
        raise SystemExit(str(error)) from None
    family = (config.get("architectures") or [None])[0]
    if family not in FAMILIES:
        raise SystemExit(f"{source}: {family} is not known how to enlarge: {', '.join(FAMILIES)}")
    for name, entry in checkpoint.tensors.items():
        if entry.dtype not in FLOATS:
            raise SystemExit(f"{source}: {name} is stored as {entry.dtype}: expand it to one of {', '.join(FLOATS)} first")
    return config, checkpoint


def inflate(source: Path, out: Path, shape: Shape) -> int:
    """→ the number of parameters."""
    config, checkpoint = opened(source)
    small = Shape.of(config)
    check(small, shape, config)
    made = enlarged(config, shape)
    widener = Widener(Sizes.of(config), Sizes.of(made), list(checkpoint.tensors), checkpoint.tensor)
    if not widener.exact and checkpoint.tensors[EMBEDDING].dtype != "F32":
        print("the width is not a power of 4 times the small one's: norms are exact in float32 alone", file=sys.stderr)
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
        made.add_argument(f"--{each.name.replace('_', '-')}", type=int, metavar="N", help=f"{KEYS[each.name]} (default: SMALL's)")
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
    config, _ = opened(args.source)
    print(f"{inflate(args.source, args.out, shape_of(args, Shape.of(config))) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
