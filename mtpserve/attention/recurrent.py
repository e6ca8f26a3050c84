"""Layers that keep a state: what a batch's spans do to the states of their requests, planned once for all of
these layers."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans, recur
from torch import Tensor

from mtpserve.cache.states import States
from mtpserve.core.arch.model import Attention, FeedForward, KVReader, LayerKind, Recurrent
from mtpserve.core.batch import Batch
from mtpserve.core.protocols.attention import AttentionBackend, Context

ONE_ROW = torch.tensor([0, 1])


# x, gates, conv, layer, spans, rule, skip: see mtpserve_kernels.recurrent.reference.
Recur = Callable[[Tensor, Tensor, Tensor, LayerState, StateSpans, Rule, Tensor | None], Tensor]


class NoContext(NamedTuple):
    """The context of a layer that keeps nothing."""


@dataclass(frozen=True, slots=True)
class StateContext:
    """core.protocols.RecurrentContext"""

    layer: LayerState
    spans: StateSpans
    rule: Rule
    kernel: Recur

    def recur(self, inputs: Tensor, gates: Tensor, conv: Tensor, skip: Tensor | None = None) -> Tensor:
        return self.kernel(inputs, gates, conv, self.layer, self.spans, self.rule, skip)


class RowByRow:
    """core.protocols.RecurrentContext for rows start … stop - 1 of a batch alone, padded to `rows`. One call
    for each row, so that its numbers are the same whatever shares the pass: slow, for the exact mode. Parts
    come in the order of their rows."""

    def __init__(self, context: StateContext, start: int, stop: int, rows: int) -> None:
        self.context, self.start, self.stop, self.rows = context, start, stop, rows

    def recur(self, inputs: Tensor, gates: Tensor, conv: Tensor, skip: Tensor | None = None) -> Tensor:
        ends, out = self.context.spans.query_start_loc.tolist(), list[Tensor]()
        for t, row in enumerate(range(self.start, self.stop)):
            span = bisect(ends, row) - 1
            out.append(self.row(span, row - ends[span], inputs[t : t + 1], gates[t : t + 1], conv, skip))
        return torch.cat([*out, *out[:1] * (self.rows - len(out))])

    def row(
        self, span: int, number: int, x: Tensor, gates: Tensor, conv: Tensor, skip: Tensor | None
    ) -> Tensor:
        """Computes one row, with so many of its span before it."""
        spans, layer, span_slice = self.context.spans, self.context.layer, slice(span, span + 1)
        node = number - int(spans.length[span]) + 1
        one = spans._replace(
            seats=spans.seats[span_slice], query_start_loc=ONE_ROW, length=ONE_ROW[1:], parents=None, widest=0
        )
        if node <= 0:
            first = int(number == 0)
            one = one._replace(
                replay=spans.replay[span_slice] * first,
                fresh=spans.fresh[span_slice] * first,
                keep_after=None,
                keep_in=None,
            )
            if spans.keep_after is not None and spans.keep_in is not None:
                # Rows that are replayed come with the first one.
                after = int(spans.keep_after[span]) - (0 if first else int(spans.replay[span]) + number)
                if 0 < after <= int(one.replay) + 1:
                    one = one._replace(keep_after=torch.tensor([after]), keep_in=spans.keep_in[span_slice])
            return self.context.kernel(x, gates, conv, layer, one, self.context.rule, skip)
        # Its ancestors' inputs wait in the ring: a copy of the state goes along its path.
        path, above = list[int](), node
        while (above := above - 1 if spans.parents is None else int(spans.parents[span, above - 1])) > 0:
            path.insert(0, above - 1)
        req_idx = int(spans.seats[span])
        copy = LayerState(
            layer.state[[req_idx]],
            layer.before[[req_idx]],
            layer.ring[req_idx, path][None],
            layer.ring_gates[req_idx, path][None],
        )
        none = torch.zeros_like(spans.seats[span_slice])
        along = one._replace(seats=none, replay=none + len(path), fresh=none, keep_after=None, keep_in=None)
        out = self.context.kernel(x, gates, conv, copy, along, self.context.rule, skip)
        layer.ring[req_idx, node - 1], layer.ring_gates[req_idx, node - 1] = x[0], gates[0]
        return out


class Recurrence:
    def __init__(self, states: States, kernel: Recur = recur) -> None:
        kind = states.kind
        self.states, self.kernel = states, kernel
        self.rule = Rule(
            kind.key_heads, kind.value_heads, kind.key_dim, kind.value_dim, kind.taps, kind.rule == "mamba2"
        )
        self.layers = [states.layer(number) for number in range(len(states.state))]

    def plan(self, batch: Batch) -> list[StateContext]:
        """Returns one context for each layer. It is called once for each step: the states then count as those
        after its committed rows."""
        req_indices, starts, computed = batch.req_indices, batch.query_start_loc[:-1], self.states.computed
        begin = batch.token_indices[starts]
        length = batch.last_token_rows - starts + 1
        replay = (begin - computed[req_indices]).clamp(min=0, max=self.states.ring.shape[2])
        keep_after = keep_in = None
        if batch.checkpoint_tokens is not None and batch.checkpoint_states is not None:
            # The host only bounds where a request's state is.
            rows = batch.checkpoint_tokens - (begin - replay)
            keep_after = rows.clamp(min=0) * (rows <= replay + length)
            keep_in = batch.checkpoint_states + self.states.max_num_reqs
        spans = StateSpans(
            req_indices,
            batch.query_start_loc,
            length,
            replay,
            (begin == 0).long(),
            None if batch.tree is None else batch.tree.parents,
            keep_after,
            keep_in,
            batch.sample_rows.shape[1] - 1,
            batch.longest,
        )
        computed[req_indices] = begin + length
        return [StateContext(layer, spans, self.rule, self.kernel) for layer in self.layers]


class MixedLayers:
    """core.protocols.AttentionBackend for models with layers of other kinds: `attention` plans for those that
    attend, `recurrence` for those that keep a state. None: there are none."""

    def __init__(
        self, layers: Sequence[LayerKind], attention: AttentionBackend, recurrence: Recurrence | None
    ) -> None:
        self.layers, self.attention, self.recurrence = layers, attention, recurrence
        self.graph_safe, self.exact = attention.graph_safe, attention.exact

    def supports(self, kind: LayerKind) -> bool:
        return isinstance(kind, Recurrent | FeedForward) or self.attention.supports(kind)

    def plan(self, batch: Batch) -> list[Context]:
        attending = iter(self.attention.plan(batch))
        recurring = iter(() if self.recurrence is None else self.recurrence.plan(batch))

        def context(kind: LayerKind) -> object:
            return (
                next(attending)
                if isinstance(kind, Attention | KVReader)
                else next(recurring)
                if isinstance(kind, Recurrent)
                else NoContext()
            )

        return [cast(Context, context(kind)) for kind in self.layers]
