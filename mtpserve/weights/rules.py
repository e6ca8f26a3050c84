r"""Maps a checkpoint's tensors to parameters: a family lists its rules, every tensor must match exactly one.
Reads no tensors.

One rule of each kind:

    Rule(r"norm\.weight", "norm.weight")
    Rule(r"layers\.(?P<layer>\d+)\.self_attn\.k_proj\.weight", "layers.{layer}.attention.qkv.weight",
    Stack(1)) Rule(r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.up_proj\.weight",
    "layers.{layer}.experts.gate_up", Expert(1)) Rule(r"layers\.(?P<layer>\d+)\.moe\.up_proj\.weight",
    "layers.{layer}.experts.gate_up", EveryExpert(1)) Rule(r"experts\.gate_up_proj", "experts.gate_up",
    Arranged(turned=True)) Rule(r".*\.rotary_emb\.inv_freq", None, Drop("computed"))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING

from mtpserve.core.errors import LoadError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Copy:
    """The whole parameter. `plus` is added to what the checkpoint has: some norms multiply by one more than
    their weight. `times`: what it has is multiplied with it."""

    plus: float = 0.0
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Stack:
    """Rows of matrix number `part` in a fused parameter; the owning module's `parts` has the row counts."""

    part: int


@dataclass(frozen=True, slots=True)
class Expert:
    """Like Stack, inside one expert of a parameter [experts, rows, columns]; the pattern's group `expert` is
    its number. `idle`: so many more experts, which compute nothing, may have tensors."""

    part: int = 0
    idle: int = 0


@dataclass(frozen=True, slots=True)
class EveryExpert:
    """Like Expert, of all experts in one tensor."""

    part: int = 0


@dataclass(frozen=True, slots=True)
class Arranged:
    """The whole parameter, which the checkpoint has in another order."""

    turned: bool = False  # matrices as [inputs, outputs]
    # a row of gate, a row of up, and so on: of all experts' matrices, or of their biases
    in_turns: bool = False
    wrapped: bool = False  # in one more dimension, of 1
    # The parameter is made of parts with so many rows, and the checkpoint has so many chunks, each with its
    # share of every part. In float8 each chunk begins a block of its own: only that tells such a matrix from
    # one in order, so that it must be in float8. Where chunks are whole blocks nothing tells; of a published
    # model's layers those without a window have chunks that are not.
    parts: tuple[int, ...] = ()
    chunks: int = 0

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the checkpoint's tensor for a parameter of the shape `wanted`."""
        shape = (*wanted[:-2], wanted[-1], wanted[-2]) if self.turned else wanted
        return (1, *shape) if self.wrapped else shape

    def arrange(self, tensor: Tensor) -> Tensor:
        """The checkpoint's tensor with its numbers in the parameter's order, a view where that is possible;
        it may have more dimensions."""
        if self.wrapped:
            tensor = tensor[0]
        if self.turned:
            tensor = tensor.mT
        if self.chunks:
            return tensor[self.order()]
        return tensor.unflatten(1, (-1, 2)).transpose(1, 2) if self.in_turns else tensor

    def order(self) -> list[int]:
        """The checkpoint's row for each row of the parameter."""
        shares = [rows // self.chunks for rows in self.parts]
        starts = [sum(shares[:part]) for part in range(len(shares))]
        chunks = [chunk * sum(shares) for chunk in range(self.chunks)]
        return [
            chunk + start + row
            for start, rows in zip(starts, shares, strict=True)
            for chunk in chunks
            for row in range(rows)
        ]


@dataclass(frozen=True, slots=True)
class Drop:
    """The tensor is known and is not loaded."""

    reason: str


How = Copy | Stack | Expert | EveryExpert | Arranged | Drop
Groups = dict[str, str]
COPY = Copy()
EXPERT = re.compile(r"\bexperts\.\d+\b")
ONE_EXPERT = re.compile(r"experts\\\.\d")  # in a pattern: it is for this expert's tensors alone
# a named group in a pattern, which may hold groups that hold none
GROUP = re.compile(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)")


@dataclass(frozen=True, slots=True)
class Rule:
    """`pattern` must match the whole of a checkpoint name. `target` is a name in the module's state dict, a
    format template over the pattern's named groups; None for Drop."""

    pattern: str
    target: str | None
    how: How = COPY

    def __post_init__(self) -> None:
        groups = re.compile(self.pattern).groupindex
        if isinstance(self.how, Expert) and "expert" not in groups:
            raise ValueError(f"a rule for experts needs a group named expert: {self.pattern}")
        if (self.target is None) != isinstance(self.how, Drop):
            raise ValueError(f"a rule has a target unless it drops: {self.pattern}")

    def resolve(self, groups: Groups) -> str:
        assert self.target is not None
        return self.target.format_map(groups)


class Matcher:
    """A list of rules, compiled. `match` raises LoadError unless exactly one rule fits."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.compiled = [(re.compile(rule.pattern), rule) for rule in rules]
        self.single = [(pattern, rule) for pattern, rule in self.compiled if ONE_EXPERT.search(rule.pattern)]
        self._candidates: dict[str, list[tuple[re.Pattern[str], Rule]]] = {}

    def match(self, name: str) -> tuple[Rule, Groups]:
        # There are tens of thousands of experts' tensors: rules that are for all experts are tried for the
        # first one's alone.
        first = EXPERT.sub("experts.0", name)
        if first not in self._candidates:
            many = (pair for pair in self.compiled if pair not in self.single)
            self._candidates[first] = [
                *self.single,
                *((pattern, rule) for pattern, rule in many if pattern.fullmatch(first)),
            ]
        matches = [
            (rule, hit) for pattern, rule in self._candidates[first] if (hit := pattern.fullmatch(name))
        ]
        if not matches:
            raise LoadError(
                f"{name}: the model has no parameter for this tensor, none of its "
                f"{len(self.compiled)} rules matches"
            )
        if len(matches) > 1:
            raise LoadError(
                f"{name}: {len(matches)} rules match this tensor: "
                f"{', '.join(rule.pattern for rule, _ in matches)}"
            )
        rule, hit = matches[0]
        return rule, {key: value or "" for key, value in hit.groupdict().items()}


def source_name(rule: Rule, target: str, expert: int | None = None) -> str | None:
    """The checkpoint name that `rule` maps to `target`, for error messages; None if it maps no name to it.

    Groups that do not occur in the target stay regular expressions in the name.
    """
    if rule.target is None:
        return None
    groups = {group[1]: group[0] for group in GROUP.finditer(rule.pattern)}
    hit = re.fullmatch(_template_regex(rule.target, groups), target)
    if hit is None:
        return None
    values = groups | hit.groupdict() | ({} if expert is None else {"expert": str(expert)})
    name = GROUP.sub(lambda group: values[group[1]], rule.pattern)
    return re.sub(r"\\([.\-_])", r"\1", name)


def _template_regex(template: str, groups: Mapping[str, str]) -> str:
    """Matches everything that the template can give: a field's first occurrence is the group's expression,
    later ones refer to it."""
    parts: list[str] = []
    seen: set[str] = set()
    for literal, name, _, _ in Formatter().parse(template):
        parts.append(re.escape(literal))
        if name:
            parts.append(f"(?P={name})" if name in seen else groups.get(name, f"(?P<{name}>.*)"))
            seen.add(name)
    return "".join(parts)
