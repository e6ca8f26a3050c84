"""Recurrences behind a short convolution, row by row, in plain torch: the gated delta rule (https://arxiv.org/abs/2412.06464) and Mamba-2's
(https://arxiv.org/abs/2405.21060 §7).

A request's state is a matrix S [key_dim, value_dim] for each head. A row decays it, writes to it under the row's key, and reads. The delta
rule replaces a part of what is there under this key, Mamba-2 adds, and lets a part of the value skip the state:

    delta      S ← e^g S        S ← S + k (β (v - Sᵀk))ᵀ        out = Sᵀ q / √key_dim
    Mamba-2    S ← e^g S        S ← S + k (β v)ᵀ                 out = Sᵀ q + D v             there q, k, v, β and g: C, B, x, Δ and Δ A

q, k and v are parts of silu(conv(inputs)), side by side in this order, of Mamba-2 as v, k and q. The convolution sees a row's inputs and
those of the `taps` - 1 rows before it; Mamba-2's has a bias. The delta rule makes q and k as long as 1 afterwards. A key head serves
value_heads / key_heads heads in a row.

What a step's rows do to a state. Rows of drafts are computed after it and leave it as it is; only their inputs are kept, in a ring. How
many of them were accepted is known when the next step begins, which first does what they should have done:

    step n         ring: none       | c  c  c | d1 d2 d3        state after the last c; ring: d1 d2 d3
    step n + 1     d1 d2 accepted   | c | d1 d2 d3              state: after d1 and d2 of the ring, then after c; ring: the new ones
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of the lengths of q and k


class Rule(NamedTuple):
    """The dimensions of a layer, and which of the two rules it has."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    mamba2: bool = False

    @property
    def channels(self) -> int:
        """Inputs of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class LayerState(NamedTuple):
    """What one layer keeps, in rows: of seats first, then of kept states. A ring has rows for seats alone."""

    state: Tensor  # [rows, value_heads, key_dim, value_dim] float32
    before: Tensor  # [rows, taps - 1, channels], the inputs of the last rows that are in the state
    ring: Tensor  # [seats, ring, channels], inputs of rows that are not
    ring_gates: Tensor  # [seats, ring, 2, value_heads] float32: g and β of these


class StateSpans(NamedTuple):
    """The spans of a step, R of them. Rows query_start_loc[r] … query_start_loc[r + 1] - 1 are span r's, the first `length[r]` of them are
    committed."""

    seats: Tensor  # [R]
    query_start_loc: Tensor  # [R + 1]
    length: Tensor  # [R]
    replay: Tensor  # [R], rows of the ring that were accepted
    fresh: Tensor  # [R], 1: the state begins with this span
    parents: Tensor | None  # [R, K] the node that draft j (node j + 1) continues, node 0 is the last committed row; None: all are chains
    keep_after: Tensor | None  # [R]: keep the state after so many rows, of those replayed and those committed; 0: do not
    keep_in: Tensor | None  # [R]: in this row of the state
    widest: int  # the most drafts of a span
    longest: int = 1  # the most committed rows of a span, or fewer


@dataclass(slots=True)
class Running:
    """States of B heads' requests on their way through rows."""

    state: Tensor  # [B, value_heads, key_dim, value_dim]
    before: Tensor  # [B, taps - 1, channels]

    def where(self, chosen: Tensor, other: Running) -> Running:
        """[B] bool: self where it is set."""
        return Running(
            torch.where(chosen[:, None, None, None], self.state, other.state), torch.where(chosen[:, None, None], self.before, other.before)
        )


def advance(
    running: Running, x: Tensor, gates: Tensor, conv: Tensor, skip: Tensor | None, rule: Rule
) -> tuple[Running, Tensor]:  # fmt: skip
    """One row x [B, channels], gates [B, 2, value_heads], conv and skip as `recur` → the state after it, and its output [B, value_heads,
    value_dim] float32."""
    seen = torch.cat([running.before, x.unsqueeze(1)], 1)  # [B, taps, channels]
    mixed = (seen.float() * conv[: rule.taps]).sum(1)
    q, k, v = parts(F.silu(mixed + conv[-1] if rule.mamba2 else mixed), rule)
    g, beta = gates.unbind(1)
    state = running.state * g.exp()[:, :, None, None]
    written = v if rule.mamba2 else v - (state * k.unsqueeze(-1)).sum(-2)
    state = state + k.unsqueeze(-1) * (written * beta.unsqueeze(-1)).unsqueeze(-2)
    out = (state * q.unsqueeze(-1)).sum(-2)
    if not rule.mamba2:
        out = out * rule.key_dim**-0.5
    return Running(state, seen[:, 1:]), out if skip is None else out + v * skip.unsqueeze(-1)


def parts(mixed: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [B, channels] → q and k [B, value_heads, key_dim], v [B, value_heads, value_dim]"""
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    if rule.mamba2:
        v, k, q = mixed.split([values, keys, keys], -1)
    else:
        q, k, v = mixed.split([keys, keys, values], -1)
    each = rule.value_heads // rule.key_heads
    q, k = (part.unflatten(-1, (rule.key_heads, -1)) for part in (q, k))
    if not rule.mamba2:
        q, k = unit(q), unit(k)
    return q.repeat_interleave(each, 1), k.repeat_interleave(each, 1), v.unflatten(-1, (rule.value_heads, -1))


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def recur(
    x: Tensor, gates: Tensor, conv: Tensor, layer: LayerState, spans: StateSpans, rule: Rule, skip: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x [T, channels], gates [T, 2, value_heads] float32, conv [taps, channels] float32 → [T, value_heads, value_dim] of x's type. Of
    Mamba-2 alone: one more row of conv, the bias, and skip [value_heads] float32, its D. Changes `layer`. Reads lengths on the host."""
    assert (skip is not None) == rule.mamba2 and len(conv) == rule.taps + rule.mamba2, (conv.shape, rule)
    out = x.new_empty(len(x), rule.value_heads, rule.value_dim)
    starts, lengths = spans.query_start_loc.tolist(), spans.length.tolist()
    shapes = [(lengths[r], starts[r + 1] - starts[r] - lengths[r]) for r in range(len(lengths))]
    for shape in dict.fromkeys(shapes):
        members = torch.tensor([r for r, other in enumerate(shapes) if other == shape], device=x.device)
        one_shape(x, gates, conv, layer, spans, rule, skip, members, shape, out)
    return out


def one_shape(
    x: Tensor, gates: Tensor, conv: Tensor, layer: LayerState, spans: StateSpans, rule: Rule, skip: Tensor | None, members: Tensor,
    shape: tuple[int, int], out: Tensor,
) -> None:  # fmt: skip
    """Spans with equal numbers of committed rows and of drafts, side by side."""
    length, drafts = shape
    seats, first, replay = spans.seats[members], spans.query_start_loc[members], spans.replay[members]
    now = Running(layer.state[seats], layer.before[seats])
    fresh = spans.fresh[members].bool()
    now = Running(torch.zeros_like(now.state), torch.zeros_like(now.before)).where(fresh, now)
    for j in range(int(replay.max())):
        after, _ = advance(now, layer.ring[seats, j], layer.ring_gates[seats, j], conv, skip, rule)
        now = after.where(j < replay, now)
        keep(now, layer, spans, members, torch.where(j < replay, j + 1, -1))
    for i in range(length):
        now, row = advance(now, x[first + i], gates[first + i], conv, skip, rule)
        out[first + i] = row.to(out.dtype)
        keep(now, layer, spans, members, replay + i + 1)
    layer.state[seats], layer.before[seats] = now.state, now.before
    nodes = [now]
    for j in range(drafts):
        row_of = first + length + j
        parent = nodes[-1] if spans.parents is None else chosen_node(nodes, spans.parents[members, j])
        after, row = advance(parent, x[row_of], gates[row_of], conv, skip, rule)
        nodes.append(after)
        out[row_of] = row.to(out.dtype)
        layer.ring[seats, j], layer.ring_gates[seats, j] = x[row_of], gates[row_of]


def keep(now: Running, layer: LayerState, spans: StateSpans, members: Tensor, after: Tensor) -> None:
    """Of these spans, those whose state is to be kept that is `now` the one after so many rows [B]."""
    if spans.keep_after is not None and spans.keep_in is not None:
        kept = spans.keep_after[members] == after
        places = spans.keep_in[members][kept]
        layer.state[places], layer.before[places] = now.state[kept], now.before[kept]


def chosen_node(nodes: list[Running], number: Tensor) -> Running:
    """number [B] → each one's node."""
    each = torch.arange(len(number), device=number.device)
    return Running(torch.stack([node.state for node in nodes])[number, each], torch.stack([node.before for node in nodes])[number, each])
