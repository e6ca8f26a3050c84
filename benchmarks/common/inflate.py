"""Embeds a small checkpoint of MiMo's architecture in a larger one that computes the same function: the larger model's cost, the small
one's text and acceptance. `python benchmarks/common/inflate.py SMALL OUT --shape 258m`.

In the larger model everything that a small one does not have is either zero when it is computed or multiplied by zero, and nothing is
left out by it: all weights are read, all products are made.

    hidden state   [ the small one's | 0 … 0 ]   so what reads it may have any weights for the padding:     random
                                                 what writes it must write zeros there:                     zero rows
    a norm         the mean of squares is over n times as many numbers, so that the normed state is sqrt(n) times as large:
                   the weight is divided by sqrt(n), exact for n a power of 4, and epsilon by n
    further heads, further inner rows, further layers
                   their values and their up projection read the padding alone, so that they are 0: queries, keys, gates, and
                   what o_proj and down_proj multiply by these zeros, are random
    further tokens their rows of the head are means of two others, which never have the largest logit

Only zeros in the activations tell the two apart, which no dense product notices. Texts are equal where sums of equal numbers are, in
whatever order: always in exact arithmetic, and in float32 but for ties within rounding.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import astuple, dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STD = 0.02
READS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # from the hidden state
SILENT = ("v_proj", "up_proj")  # whatever the small model does not have of these is 0 when computed
NORMS = ("input_layernorm", "post_attention_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm", "norm")
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int  # without the MTP layer
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
        return cls(*(config[name] for name in names))


SHAPES = {"258m": Shape(16, 1024, 2816, 16, 8, 27008), "500m": Shape(28, 1024, 3072, 16, 8, 65024)}


class Inflater:
    def __init__(self, small: Shape, large: Shape, head_dim: int, dtype: torch.dtype) -> None:
        padding = large.hidden // small.hidden
        self.scale = isqrt(padding)
        if small.hidden * padding != large.hidden or self.scale**2 != padding or self.scale & (self.scale - 1):
            raise SystemExit(f"hidden_size must be {small.hidden} times a power of 4, got {large.hidden}")
        if any(b < a for a, b in zip(astuple(small), astuple(large), strict=True)):
            raise SystemExit(f"every number of {large} must be at least that of {small}")
        if large.heads * small.kv_heads != small.heads * large.kv_heads:
            raise SystemExit(f"{large.heads} heads over {large.kv_heads} are not grouped as {small.heads} over {small.kv_heads}")
        self.small, self.large, self.dtype = small, large, dtype
        heads, kv = large.heads * head_dim, large.kv_heads * head_dim
        self.shapes = {"q_proj": (heads, large.hidden), "k_proj": (kv, large.hidden), "v_proj": (kv, large.hidden)}
        self.shapes |= {"o_proj": (large.hidden, heads), "down_proj": (large.hidden, large.inner)}
        self.shapes |= dict.fromkeys(("gate_proj", "up_proj"), (large.inner, large.hidden))
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * STD).to(self.dtype)

    def layer(self, tensors: Tensors, prefix: str) -> Tensors:
        """A layer of which the small model has `tensors`, by their names after `prefix`: all of them, or none for a further layer."""
        made = {}
        for name, (rows, columns) in self.shapes.items():
            full = f"{'mlp' if name in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{name}"
            # A further layer has no rows of the small one's, and reads the small one's hidden state like any other.
            weight = tensors.get(f"{full}.weight", torch.empty(0, self.small.hidden if name in READS else 0, dtype=self.dtype))
            made[f"{full}.weight"] = self.widened(weight, rows, columns, silent=name not in READS or name in SILENT)
            if name in ("q_proj", "k_proj", "v_proj"):
                bias = tensors.get(f"{full}.bias", torch.empty(0, dtype=self.dtype))
                rest = rows - len(bias)
                made[f"{full}.bias"] = torch.cat([bias, torch.zeros(rest, dtype=self.dtype) if name in SILENT else self.random(rest)])
        for name in NORMS[:2]:
            made[f"{name}.weight"] = self.norm(tensors.get(f"{name}.weight", torch.ones(self.small.hidden, dtype=self.dtype)))
        return {prefix + name: tensor for name, tensor in made.items()}

    def widened(self, weight: Tensor, rows: int, columns: int, silent: bool) -> Tensor:
        """weight [r, c] → [rows, columns]. The columns after c multiply zeros. The rows after r give 0 where they are `silent`."""
        r, c = weight.shape
        out = self.random(rows, columns)
        out[:r, :c] = weight
        if silent:
            out[r:, :c] = 0
        return out

    def norm(self, weight: Tensor) -> Tensor:
        return torch.cat([weight, torch.ones(self.large.hidden - len(weight), dtype=self.dtype)]) / self.scale

    def fusion(self, weight: Tensor) -> Tensor:
        """[h, 2 h]: the hidden state's half and the embedding's are padded separately."""
        return torch.cat([self.widened(half, self.large.hidden, self.large.hidden, silent=True) for half in weight.chunk(2, 1)], 1)

    def ends(self, embedding: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        extra = self.large.vocab - len(head)
        wide_embedding = self.random(self.large.vocab, self.large.hidden)
        wide_embedding[:, self.small.hidden :] = 0
        wide_embedding[: len(embedding), : self.small.hidden] = embedding
        one = torch.randint(len(head), (extra,), generator=self.generator)
        other = (one + torch.randint(1, len(head), (extra,), generator=self.generator)) % len(head)
        means = ((head[one].float() + head[other].float()) / 2).to(self.dtype)
        return wide_embedding, self.widened(torch.cat([head, means]), self.large.vocab, self.large.hidden, silent=False)

    def all(self, tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for i in range(self.large.layers):
            made |= self.layer(under(tensors, f"model.layers.{i}."), f"model.layers.{i}.")
        prefix = "model.mtp_layers.0."
        own = under(tensors, prefix)
        made |= self.layer(own, prefix)
        made |= {f"{prefix}{name}.weight": self.norm(own[f"{name}.weight"]) for name in NORMS[2:5]}
        made[f"{prefix}input_proj.weight"] = self.fusion(own["input_proj.weight"])
        made["model.norm.weight"] = self.norm(tensors["model.norm.weight"])
        embedding, head = self.ends(tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
        return made | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def inflate(source: Path, out: Path, shape: Shape) -> int:
    """→ the number of parameters."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    inflater = Inflater(Shape.of(config), shape, config["head_dim"], tensors["lm_head.weight"].dtype)
    made = inflater.all(tensors)
    out.mkdir(parents=True, exist_ok=True)
    save_file(made, out / "model.safetensors")
    config |= {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
        "rms_norm_eps": config["rms_norm_eps"] / inflater.scale**2,
    }  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out / name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(tensor.numel() for tensor in made.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="258m")
    args = parser.parse_args()
    print(f"{inflate(args.source, args.out, SHAPES[args.shape]) / 1e6:.1f} M parameters")
