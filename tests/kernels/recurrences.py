"""Random batches for the kernels of recurrent layers: ragged spans, some of them trees, on states of which some have rows to replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans
from torch import Tensor

DELTA = [Rule(1, 1, 4, 6, 4), Rule(2, 4, 6, 10, 4), Rule(2, 2, 16, 70, 2), Rule(1, 3, 33, 19, 3), Rule(4, 4, 128, 128, 4)]
MAMBA2 = [Rule(1, 1, 4, 6, 4, True), Rule(2, 4, 10, 7, 3, True), Rule(1, 2, 128, 64, 4, True)]
RULES = DELTA + MAMBA2


@dataclass(frozen=True)
class Case:
    rule: Rule
    x: Tensor
    gates: Tensor
    conv: Tensor
    layer: LayerState
    spans: StateSpans
    skip: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Case:
        layer = self.layer._replace(before=self.layer.before.to(dtype), ring=self.layer.ring.to(dtype))
        return replace(self, x=self.x.to(dtype), layer=layer)

    def at(self, device: torch.device) -> Case:
        spans = StateSpans(*(part.to(device) if isinstance(part, Tensor) else part for part in self.spans))
        layer = LayerState(*(part.to(device) for part in self.layer))
        numbers = (part.to(device) for part in (self.x, self.gates, self.conv))
        return Case(self.rule, *numbers, layer, spans, None if self.skip is None else self.skip.to(device))

    def copied(self) -> LayerState:
        return LayerState(*(part.clone() for part in self.layer))


def case(rule: Rule, seed: int, trees: bool, requests: int = 5, ring: int = 5, longest: int = 9) -> Case:
    """Everything that must not be read is NaN: states of requests that begin, rings beyond what is replayed, seats of nobody."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    seats = random.sample(range(requests + 3), requests)
    lengths = [random.randint(1, longest) for _ in seats]
    drafts = [random.randint(0, ring) for _ in seats]
    fresh = [random.random() < 0.3 for _ in seats]
    replay = [0 if new else random.randint(0, ring) for new in fresh]
    ends = torch.tensor([0, *(n + k for n, k in zip(lengths, drafts, strict=True))]).cumsum(0)
    total, kept = int(ends[-1]), 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def gates(*shape: int) -> Tensor:
        """Decays and shares."""
        return torch.stack([-normal(*shape).abs(), normal(*shape).sigmoid()], -2)

    rows = requests + 3
    layer = LayerState(
        torch.full((rows + kept, rule.value_heads, rule.key_dim, rule.value_dim), torch.nan),
        torch.full((rows + kept, rule.taps - 1, rule.channels), torch.nan),
        torch.full((rows, ring, rule.channels), torch.nan),
        torch.full((rows, ring, 2, rule.value_heads), torch.nan),
    )
    for req_idx, new, number in zip(seats, fresh, replay, strict=True):
        if not new:
            layer.state[req_idx], layer.before[req_idx] = normal(*layer.state.shape[1:]), normal(*layer.before.shape[1:])
        layer.ring[req_idx, :number], layer.ring_gates[req_idx, :number] = normal(number, rule.channels), gates(number, rule.value_heads)
    parents = torch.tensor([[random.randint(0, j) for j in range(ring)] for _ in seats])
    # The first one's is kept on the way through its ring.
    ways = [m if m and i == 0 else n + m for i, (n, m) in enumerate(zip(lengths, replay, strict=True))]
    keeps = [random.randint(1, way) if i < kept else 0 for i, way in enumerate(ways)]
    spans = StateSpans(
        torch.tensor(seats),
        ends,
        torch.tensor(lengths),
        torch.tensor(replay),
        torch.tensor(fresh).long(),
        parents if trees else None,
        torch.tensor(keeps) if seed % 2 else None,
        torch.tensor([rows + min(i, kept - 1) for i in range(requests)]) if seed % 2 else None,
        ring,
        longest,
    )
    numbers = normal(total, rule.channels), gates(total, rule.value_heads), normal(rule.taps + rule.mamba2, rule.channels)
    return Case(rule, *numbers, layer, spans, normal(rule.value_heads) if rule.mamba2 else None)
