"""The tensors of an enlarged checkpoint: inflate.py says why the function stays the same. Knows names and shapes, and no files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2, sqrt
from typing import Any

import torch
from torch import Tensor

STD = 0.02
NEVER = 2.0  # below the smallest bias: more than the difference of two sigmoids
Read = Callable[[str], Tensor]  # a tensor of the small checkpoint by its name

# The matrices inside a layer: axes of rows and columns, by their names in Sizes, and whether rows that the small model lacks must give 0:
# what writes the hidden state writes zeros to its padding.
MATRICES = {
    "self_attn.q_proj": ("queries", "hidden", False),
    "self_attn.q_a_proj": ("query_rank", "hidden", False),
    "self_attn.q_b_proj": ("queries", "query_rank", False),
    "self_attn.kv_a_proj_with_mqa": ("latent", "hidden", False),
    "self_attn.k_proj": ("keys", "hidden", False),
    "self_attn.v_proj": ("keys", "hidden", True),
    "self_attn.o_proj": ("hidden", "values", True),
    "mlp.gate_proj": ("inner", "hidden", False),
    "mlp.up_proj": ("inner", "hidden", True),
    "mlp.down_proj": ("hidden", "inner", True),
    "mlp.shared_experts.gate_proj": ("shared", "hidden", False),
    "mlp.shared_experts.up_proj": ("shared", "hidden", True),
    "mlp.shared_experts.down_proj": ("hidden", "shared", True),
    "mlp.experts.gate_proj": ("expert", "hidden", False),
    "mlp.experts.up_proj": ("expert", "hidden", True),
    "mlp.experts.down_proj": ("hidden", "expert", True),
}
NORM = re.compile(r"(input_layernorm|post_attention_layernorm|enorm|hnorm|shared_head\.norm|(token|hidden|final)_layernorm)\.weight")
LATENT_NORMS = "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"
BIAS = re.compile(r"self_attn\.([qkv])_proj\.bias")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}  # in the MTP layer, the trunk's own
OWN_LAYER = re.compile(r"model\.(mtp_layers|layers)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of the axes in MATRICES, and the numbers of layers, heads, tokens and experts."""

    layers: int
    heads: int
    vocab: int
    hidden: int
    inner: int
    queries: int
    keys: int
    values: int
    query_rank: int
    latent: int
    unrotated: int  # of a latent head's key
    value: int  # a head's
    expert: int
    shared: int
    experts: int
    groups: int  # of experts, among which the router chooses; 1 where it chooses them all
    per_token: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Sizes:
        def number(name: str, default: int = 0) -> int:
            return int(config.get(name) or default)

        heads, latent = number("num_attention_heads"), number("kv_lora_rank")
        dim = number("qk_nope_head_dim") + number("qk_rope_head_dim") if latent else number("head_dim", number("hidden_size") // heads)
        value = number("v_head_dim") if latent else dim
        return cls(
            layers=number("num_hidden_layers"),
            heads=heads,
            vocab=number("vocab_size"),
            hidden=number("hidden_size"),
            inner=number("intermediate_size"),
            queries=heads * dim,
            keys=number("num_key_value_heads", heads) * dim,
            values=heads * value,
            query_rank=number("q_lora_rank"),
            latent=latent + number("qk_rope_head_dim"),
            unrotated=number("qk_nope_head_dim"),
            value=value,
            expert=number("moe_intermediate_size"),
            shared=number("moe_intermediate_size") * number("n_shared_experts"),
            experts=number("n_routed_experts"),
            groups=number("n_group", 1) if number("topk_group", 1) < number("n_group", 1) else 1,
            per_token=number("num_experts_per_tok"),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """An expert of the large model: the one of the small model that it repeats, and whether it is ever chosen."""

    source: int
    chosen: bool


def placed(small: Sizes, large: Sizes) -> list[Place]:
    """The large model's experts, in order: every group has all experts of the small model's group that it copies, then spare ones."""
    if not small.experts:
        return []
    copies = large.per_token // small.per_token
    size, made = small.experts // small.groups, []
    for group in range(large.groups):
        start = group % small.groups * size
        live = list(range(start, start + size)) * (copies if large.groups == small.groups == 1 else 1)
        made += [Place(live[i % len(live)], i < len(live)) for i in range(large.experts // large.groups)]
    return made


class Widener:
    """`tensors()` gives the large checkpoint's, one by one. `names` are the small one's, and `read` gives them."""

    def __init__(self, small: Sizes, large: Sizes, names: Sequence[str], read: Read) -> None:
        self.small, self.large, self.read = small, large, read
        self.names = [name for name in names if not name.endswith("rotary_emb.inv_freq")]
        self.places = placed(small, large)
        self.dtype = read(EMBEDDING).dtype
        self.scale = sqrt(large.hidden / small.hidden)
        self.exact = log2(self.scale).is_integer()
        self.generator = torch.Generator().manual_seed(0)
        self.unused = set(self.names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        ends = self.ends()
        yield from ends.items()
        small, large = self.small.layers, self.large.layers
        for i in range(large):
            yield from self.layer(f"model.layers.{min(i, small - 1)}.", f"model.layers.{i}.", ends, further=i >= small)
        for prefix, kind, number in self.own_layers():
            moved = f"model.layers.{number - small + large}." if kind == "layers" else prefix
            yield from self.layer(prefix, moved, ends, further=False)
        if self.unused:
            raise SystemExit(f"{min(self.unused)}: it is not known how to enlarge this tensor")

    def own_layers(self) -> list[tuple[str, str, int]]:
        """The MTP layers: prefix, kind and number."""
        hits = {hit[0]: hit for name in self.names if (hit := OWN_LAYER.match(name))}
        found = [(prefix, hit[1], int(hit[2])) for prefix, hit in hits.items()]
        return sorted(each for each in found if each[1] == "mtp_layers" or each[2] >= self.small.layers)

    def get(self, name: str) -> Tensor:
        self.unused.discard(name)
        return self.read(name)

    def random(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * STD).to(self.dtype)

    def ends(self) -> dict[str, Tensor]:
        """Embedding, head and final norm. The head's further rows are means of two others, which never have the largest logit."""
        vocab, hidden = self.large.vocab, self.large.hidden
        rows, tied = self.get(EMBEDDING), HEAD not in self.names
        head = rows if tied else self.get(HEAD)
        extra = vocab - len(head)
        one = torch.randint(len(head), (extra,), generator=self.generator)
        other = (one + torch.randint(1, len(head), (extra,), generator=self.generator)) % len(head)
        means = ((head[one].float() + head[other].float()) / 2).to(self.dtype)
        embedding = torch.zeros(vocab, hidden, dtype=self.dtype)
        embedding[:, : self.small.hidden] = torch.cat([rows, means if tied else self.random(extra, self.small.hidden)])
        made = {EMBEDDING: embedding, "model.norm.weight": self.norm(self.get("model.norm.weight"))}
        return made if tied else made | {HEAD: self.widened(torch.cat([head, means]), vocab, hidden, silent=False)}

    def layer(self, source: str, target: str, ends: dict[str, Tensor], further: bool) -> Iterator[tuple[str, Tensor]]:
        """The layer `source` under the prefix `target`; a `further` one has the same tensors and adds nothing to the hidden state."""
        names = [name.removeprefix(source) for name in self.names if name.startswith(source)]
        for name in names:
            if not EXPERT.fullmatch(name):
                small = self.get(source + name)
                made = ends[COPIES[name]].clone() if name in COPIES else self.larger(name, self.nothing(name, small) if further else small)
                yield target + name, made
        for i, place in enumerate(self.places if any(map(EXPERT.fullmatch, names)) else []):
            for part in ("gate_proj", "up_proj", "down_proj"):
                small, name = self.get(f"{source}mlp.experts.{place.source}.{part}.weight"), f"mlp.experts.{part}.weight"
                yield f"{target}mlp.experts.{i}.{part}.weight", self.larger(name, self.nothing(name, small) if further else small)

    def nothing(self, name: str, like: Tensor) -> Tensor:
        """What a further layer has of a tensor before it is enlarged: no rows and neurons, a random router, and norms of 1."""
        if NORM.fullmatch(name) or name in LATENT_NORMS:
            return torch.ones_like(like)
        if name == "mlp.gate.e_score_correction_bias":
            return torch.zeros_like(like)
        if name == "mlp.gate.weight":
            return self.random(*like.shape).to(like.dtype)
        reads = MATRICES.get(name.removesuffix(".weight"), ("", "", False))[1]
        # It reads the small model's hidden state like any other layer, and has no columns of anything else.
        return like[:0] if like.ndim == 1 or reads in ("hidden", "") else like[:0, :0]

    def larger(self, name: str, tensor: Tensor) -> Tensor:
        large = self.large
        if NORM.fullmatch(name):
            return self.norm(tensor)
        if name in LATENT_NORMS:
            return tensor.clone()
        if hit := BIAS.fullmatch(name):
            rest = (large.queries if hit[1] == "q" else large.keys) - len(tensor)
            return torch.cat([tensor, torch.zeros(rest, dtype=tensor.dtype) if hit[1] == "v" else self.random(rest).to(tensor.dtype)])
        if name in ("eh_proj.weight", "input_proj.weight"):  # both halves are padded, each for itself
            return torch.cat([self.widened(half, large.hidden, large.hidden, silent=True) for half in tensor.chunk(2, 1)], 1)
        if name == "mlp.gate.weight":
            return self.router(tensor)
        if name == "mlp.gate.e_score_correction_bias":
            never = tensor.min() - NEVER
            return torch.stack([tensor[place.source] if place.chosen else never for place in self.places])
        if name == "self_attn.kv_b_proj.weight":
            return self.keys_and_values(tensor)
        if name.removesuffix(".weight") not in MATRICES:
            raise SystemExit(f"{name}: it is not known how to enlarge this tensor")
        rows, columns, silent = MATRICES[name.removesuffix(".weight")]
        return self.widened(tensor, getattr(large, rows), getattr(large, columns), silent)

    def widened(self, weight: Tensor, rows: int, columns: int, silent: bool) -> Tensor:
        """weight [r, c] → [rows, columns]. The columns after c multiply zeros; a row's largest number stays its largest, so that a format
        with a scale per row rounds it as before. The rows after r give 0 where they are `silent`."""
        r, c = weight.shape
        out = self.random(rows, columns).to(weight.dtype)
        if c:
            largest = weight.abs().amax(1, keepdim=True)
            out[:r] = out[:r].clamp(-largest, largest)
        out[:r, :c] = weight
        if silent:
            out[r:, :c] = 0
        return out

    def keys_and_values(self, weight: Tensor) -> Tensor:
        """[heads (nope + value), rank]. Of further heads the rows for keys are random and those for values are 0: all heads read the
        same latent, which is not."""
        made = self.random(self.large.heads, self.large.unrotated + self.large.value, weight.shape[1]).to(weight.dtype)
        made[:, self.large.unrotated :] = 0
        own = weight.view(-1, *made.shape[1:])
        made[: len(own)] = own
        return made.flatten(0, 1)

    def router(self, weight: Tensor) -> Tensor:
        """Copies differ in what multiplies the padding alone; one that is never chosen differs in all."""
        out = self.random(len(self.places), self.large.hidden).to(weight.dtype)
        for row, place in zip(out, self.places, strict=True):
            row[: self.small.hidden] = weight[place.source] + (0 if place.chosen else row[: self.small.hidden])
        return out

    def norm(self, weight: Tensor) -> Tensor:
        """In float32 where the scale is no power of 2: 16 bits do not hold the quotient."""
        wide = torch.cat([weight, torch.ones(self.large.hidden - len(weight), dtype=weight.dtype)])
        return wide / self.scale if self.exact else wide.float() / self.scale
