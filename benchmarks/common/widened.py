"""The tensors of an enlarged checkpoint: inflate.py says why the function stays the same. Knows shapes and parameters, and no files.

A family's weight rules say which parameter each tensor is, so that what follows is said once, of parameters, for all families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import log2, sqrt

import torch
from torch import Tensor

from mtpserve.core.arch.model import Attention, ModelArch, MoEArch
from mtpserve.weights.rules import Arranged, Drop, Expert, How, Matcher, Rule, Stack

STD = 0.02
NEVER, FAR = 2.0, 1e4  # below the smallest bias: more than the difference of two sigmoids, and of two logits
Read = Callable[[str], Tensor]  # a tensor of the small checkpoint by its name

# The matrices, in parts where a parameter is made of several: axes of rows and columns, by their names in Axes, None for one that does not
# grow; and whether rows that the small model lacks must give 0. What writes the hidden state writes zeros to its padding.
ROW = ((None, "hidden", True),)
MATRICES: dict[str, tuple[tuple[str | None, str | None, bool], ...]] = {
    "attention.qkv.weight": (("queries", "hidden", False), ("keys", "hidden", False), ("values", "hidden", True)),
    "attention.down.weight": (("q_down", "hidden", False), (None, "hidden", False)),
    "attention.q_up.weight": (("queries", None, False),),
    "attention.out.weight": (("hidden", "read", True),),
    "attention.inputs.weight": ROW,
    "attention.gates.weight": ROW,
    "attention.indexer.key.weight": ROW,
    "attention.indexer.weigh.weight": ROW,
    "mlp.gate_up.weight": (("inner", "hidden", False), ("inner", "hidden", True)),
    "mlp.down.weight": (("hidden", "inner", True),),
    "mlp.shared.gate_up.weight": (("shared", "hidden", False), ("shared", "hidden", True)),
    "mlp.shared.down.weight": (("hidden", "shared", True),),
    "mlp.shared_gate.weight": ROW,
    "mlp.experts.gate_up": (("expert", "hidden", False), ("expert", "hidden", True)),
    "mlp.experts.down": (("hidden", "expert", True),),
}
VECTORS: dict[str, tuple[tuple[str, bool], ...]] = {  # axis, and whether further numbers must be 0
    "attention.qkv.bias": (("queries", False), ("keys", False), ("values", True)),
    "attention.out.bias": (("hidden", True),),
    "attention.sinks": (("heads", False),),
    "mlp.experts.gate_up_bias": (("expert", False), ("expert", True)),
    "mlp.experts.down_bias": (("hidden", True),),
}
NORM = re.compile(r"(attention_norm|mlp_norm|norm|fusion\.embedding_norm|fusion\.hidden_norm)\.weight")
KEPT = re.compile(r"attention\.(\w+_norm\.weight|norm\.weight|conv|decay|decay_bias|indexer\.(q_up\.weight|key_norm\.(weight|bias)))")
OWNER = re.compile(r"(layers\.(?P<layer>\d+)\.|mtp_head\.(depths\.(?P<depth>\d+)\.)?(layer\.)?)?(?P<inner>.+)")
PICTURES = "model.language_model."  # before the text model's names, in checkpoints that see pictures


@dataclass(frozen=True, slots=True)
class Axes:
    """Their lengths in one layer."""

    hidden: int
    heads: int
    queries: int
    keys: int
    values: int  # of all heads of keys
    read: int  # what the output projection reads
    q_down: int
    inner: int
    expert: int
    shared: int

    @classmethod
    def of(cls, arch: ModelArch, layer: int) -> Axes:
        kind, moe, queries = arch.layers[layer], arch.moe, arch.heads * arch.head_dim
        kv = kind.kv if isinstance(kind, Attention) else None
        read = kind.value_heads * kind.value_dim if not isinstance(kind, Attention) else arch.heads * kind.kv.value_dim
        return cls(
            hidden=arch.hidden,
            heads=arch.heads,
            queries=queries * (1 + arch.out_gate),
            keys=kv.heads * kv.key_dim if kv else 0,
            values=kv.heads * kv.value_dim if kv else 0,
            read=arch.heads * arch.mla.value if arch.mla else read,
            q_down=arch.mla.q_rank or queries if arch.mla else 0,
            inner=arch.intermediate,
            expert=moe.size if moe else 0,
            shared=moe.shared if moe else 0,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """An expert of the large model: the one of the small model that it repeats, and whether it is ever chosen."""

    source: int
    chosen: bool


def placed(small: MoEArch | None, large: MoEArch | None) -> list[Place]:
    """The large model's experts, in order: every group has all experts of the small model's group that it copies, then spare ones."""
    if small is None or large is None:
        return []
    copies, groups = large.top_k // small.top_k, small.groups if small.top_groups < small.groups else 1
    many = large.groups if groups > 1 else 1
    size, made = small.experts // groups, []
    for group in range(many):
        start = group % groups * size
        live = list(range(start, start + size)) * (copies if groups == 1 else 1)
        made += [Place(live[i % len(live)], i < len(live)) for i in range(large.experts // many)]
    return made


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the small checkpoint: its name, the parameter's inside its layer, and how it becomes that."""

    name: str
    inner: str
    how: How


class Widener:
    """`tensors()` gives the large checkpoint's, one by one. `names` and `rules` are the small one's, and `read` gives its tensors."""

    def __init__(self, small: ModelArch, large: ModelArch, names: Iterable[str], rules: Iterable[Rule], read: Read) -> None:
        self.small, self.large, self.read = small, large, read
        self.places = placed(small.moe, large.moe)
        self.scale, self.exact = sqrt(large.hidden / small.hidden), self.holds(small.hidden, large.hidden)
        self.generator = torch.Generator().manual_seed(0)
        self.ends: dict[str, Entry] = {}
        self.layers: list[list[Entry]] = [[] for _ in small.layers]  # the MTP layers' own tensors among those of their decoder layer
        matcher = Matcher(rules)
        for name in names:
            self.place(name, *matcher.match(name))

    @staticmethod
    def holds(small: int, large: int) -> bool:
        """Whether 16 bits hold what is multiplied by the scale for these widths."""
        return log2(large / small).is_integer() and log2(large / small) % 2 == 0

    def place(self, name: str, rule: Rule, groups: dict[str, str]) -> None:
        trunk = self.small.num_layers
        if isinstance(rule.how, Drop):
            copied = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))  # of the trunk's, in the MTP layer
            if copied and (hit := re.match(r"model\.layers\.(\d+)\.", name)):
                self.layers[int(hit[1])].append(Entry(name, "embed.weight" if "embed" in name else "head.weight", rule.how))
            return
        target = rule.resolve(groups)
        hit = OWNER.fullmatch(target)
        assert hit is not None
        entry = Entry(name, hit["inner"], rule.how)
        if target.startswith(("layers.", "mtp_head.")):
            self.layers[int(hit["layer"] or trunk + int(hit["depth"] or 0))].append(entry)
        else:
            self.ends[entry.inner] = entry

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        small, large = self.small.num_layers, self.large.num_layers
        ends = self.made_ends()
        for inner, entry in self.ends.items():
            yield entry.name.replace(PICTURES, "model."), ends[inner]
        if "head.weight" in ends.keys() - self.ends.keys():  # the small model's is its embedding
            yield "lm_head.weight", ends["head.weight"]
        for layer in range(len(self.large.layers)):
            further = small <= layer < large
            source = self.alike(layer) if further else layer if layer < small else layer - large + small
            for entry in self.layers[source]:
                name = entry.name.replace(PICTURES, "model.").replace(f"model.layers.{source}.", f"model.layers.{layer}.")
                if isinstance(entry.how, Drop):
                    yield name, ends[entry.inner].clone()
                elif isinstance(entry.how, Expert):
                    yield from self.clones(entry, name, source, layer, further)
                else:
                    yield name, self.larger(entry, self.read(entry.name), layer, further)

    def alike(self, layer: int) -> int:
        """The last layer of the small model that is of the further layer's kind."""

        def kind(arch: ModelArch, number: int) -> tuple[object, ...]:
            made, dense = arch.layers[number], arch.moe is None or number in arch.moe.dense
            return (made.window is None, made.index_dim, dense) if isinstance(made, Attention) else ("recurrent", dense)

        wanted = kind(self.large, layer)
        found = [number for number in range(self.small.num_layers) if kind(self.small, number) == wanted]
        if not found:
            raise SystemExit(f"layer {layer} would be of a kind that no layer of the small model has: give fewer --layers")
        return found[-1]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * STD

    def made_ends(self) -> dict[str, Tensor]:
        """Embedding, head and final norm. The head's further rows are means of two others, which never have the largest logit."""
        vocab, hidden, read = self.large.vocab, self.large.hidden, {inner: self.read(entry.name) for inner, entry in self.ends.items()}
        rows, norm = read["embed.weight"], read["norm.weight"]
        head = read.get("head.weight", rows)
        extra = vocab - len(head)
        one = torch.randint(len(head), (extra,), generator=self.generator)
        other = (one + torch.randint(1, len(head), (extra,), generator=self.generator)) % len(head)
        means = ((head[one].float() + head[other].float()) / 2).to(head.dtype)
        embedding = torch.zeros(vocab, hidden)
        embedding[: len(rows), : rows.shape[1]] = rows * self.scale
        embedding[len(rows) :, : rows.shape[1]] = means * self.scale if self.large.tied_head else self.random(extra, rows.shape[1])
        made = {"embed.weight": self.stored(embedding, rows), "norm.weight": self.stored(self.norm(norm), norm)}
        if self.large.tied_head:
            return made
        return made | {"head.weight": self.stored(self.widened(torch.cat([head, means]), vocab, hidden, False, "vocab", "hidden"), head)}

    def stored(self, tensor: Tensor, like: Tensor) -> Tensor:
        return tensor.to(like.dtype if self.exact else torch.float32)

    def clones(self, entry: Entry, name: str, source: int, layer: int, further: bool) -> Iterator[tuple[str, Tensor]]:
        """Of an expert whose matrices are tensors of their own."""
        hit = re.search(r"\.experts\.(\d+)\.", entry.name)
        assert hit is not None
        for number, place in enumerate(self.places):
            if place.source == int(hit[1]):
                yield name.replace(hit[0], f".experts.{number}."), self.larger(entry, self.read(entry.name), layer, further)

    def larger(self, entry: Entry, given: Tensor, layer: int, further: bool) -> Tensor:
        """`further`: the layer adds nothing to the hidden state."""
        inner, how = entry.inner, entry.how
        tensor = how.arrange(given) if isinstance(how, Arranged) else given
        tensor = tensor.flatten(1, 2) if isinstance(how, Arranged) and how.in_turns else tensor
        part = how.part if isinstance(how, Stack | Expert) else 0
        axes = Axes.of(self.large, layer)
        if NORM.fullmatch(inner):
            made = self.norm(tensor)
        elif KEPT.fullmatch(inner):
            made = tensor.clone()
        elif inner == "fusion.project.weight":  # both halves are padded, each for itself
            made = torch.cat([self.widened(half, axes.hidden, axes.hidden, True, "hidden", "hidden") for half in tensor.chunk(2, 1)], 1)
        elif inner == "mlp.router.weight":
            made = self.router(self.random(*tensor.shape) if further else tensor)
        elif inner == "mlp.router.bias":
            made = self.router_bias(tensor)
        elif inner == "attention.kv_up":
            made = self.keys_and_values(tensor[:0] if further else tensor)
        elif inner.startswith("mlp.experts.") and not isinstance(how, Expert):
            made = torch.stack([self.part(inner, None, tensor[place.source], axes, further) for place in self.places])
        else:
            made = self.part(inner, part, tensor, axes, further)
        return self.stored(arranged_back(how, made), given)

    def part(self, inner: str, number: int | None, tensor: Tensor, axes: Axes, further: bool) -> Tensor:
        """A part of a parameter; number None: all of its parts, one after the other."""
        table = MATRICES.get(inner) or VECTORS.get(inner)
        if table is None:
            raise SystemExit(f"{inner}: it is not known how to enlarge this parameter")
        if number is None:
            chunks = tensor.chunk(len(table))
            return torch.cat([self.part(inner, i, chunk, axes, further) for i, chunk in enumerate(chunks)])
        *names, silent = table[min(number, len(table) - 1)]
        if inner.startswith("mlp.experts.gate_up") and self.large.moe is not None and self.large.moe.gate is not None:
            silent = not silent  # a clamped gate adds 1 to up: it is the gate that must be 0
        lengths = [size if name is None else int(getattr(axes, name)) for name, size in zip(names, tensor.shape, strict=True)]
        if inner in VECTORS:
            return self.padded(tensor[:0] if further else tensor, lengths[0], silent, names[0])
        reads = names[1] == "hidden"  # a further layer reads the small model's hidden state like any other, and nothing of its own
        small = tensor if not further else tensor[:0] if reads else tensor[:0, :0]
        return self.widened(small, lengths[0], lengths[1], silent, *names)

    def padded(self, vector: Tensor, length: int, silent: bool, axis: str | None) -> Tensor:
        rest = torch.zeros(length - len(vector)) if silent else self.random(length - len(vector))
        return torch.cat([vector * (self.scale if axis == "hidden" else 1.0), rest])

    def widened(self, weight: Tensor, rows: int, columns: int, silent: bool, writes: str | None, reads: str | None) -> Tensor:
        """weight [r, c] → [rows, columns]. The columns after c multiply zeros; a row's largest number stays its largest, so that a format
        with a scale per row rounds it as before. The rows after r give 0 where they are `silent`."""
        weight = weight * ((self.scale if writes == "hidden" else 1.0) / (self.scale if reads == "hidden" else 1.0))
        r, c = weight.shape
        out = self.random(rows, columns)
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
        mla = self.large.mla
        assert mla is not None
        made = self.random(self.large.heads, mla.nope + mla.value, weight.shape[1])
        made[:, mla.nope :] = 0
        own = weight.view(-1, *made.shape[1:])
        made[: len(own)] = own
        return made.flatten(0, 1)

    def router(self, weight: Tensor) -> Tensor:
        """Copies differ in what multiplies the padding alone; one that is never chosen differs in all."""
        out = self.random(len(self.places), self.large.hidden)
        for row, place in zip(out, self.places, strict=True):
            row[: weight.shape[1]] = (weight[place.source] + (0 if place.chosen else row[: weight.shape[1]])) / self.scale
        return out

    def router_bias(self, bias: Tensor) -> Tensor:
        small, large = self.small.moe, self.large.moe
        assert small is not None and large is not None
        never = bias.min() - (FAR if small.router_bias == "logits" else NEVER)
        # A softmax over clones gives each its share of the score to which the bias is added.
        shares = large.top_k // small.top_k if small.scores == "softmax" and small.router_bias == "choice" else 1
        return torch.stack([bias[place.source] / shares if place.chosen else never for place in self.places])

    def norm(self, weight: Tensor) -> Tensor:
        return torch.cat([weight, torch.ones(self.large.hidden - len(weight), dtype=weight.dtype)])


def arranged_back(how: How, tensor: Tensor) -> Tensor:
    """In the checkpoint's order: what Arranged.arrange undoes."""
    if not isinstance(how, Arranged):
        return tensor
    if how.in_turns:
        tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    tensor = tensor.mT if how.turned else tensor
    return tensor[None] if how.wrapped else tensor
