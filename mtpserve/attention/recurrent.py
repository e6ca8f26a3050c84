"""Layers that keep a state: what a batch's spans do to the states of their requests, planned once for all of these layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans, recur
from torch import Tensor

from mtpserve.cache.states import States
from mtpserve.core.arch import Attention, LayerKind
from mtpserve.core.batch import Batch
from mtpserve.core.protocols import AttentionBackend, Context

Recur = Callable[[Tensor, Tensor, Tensor, LayerState, StateSpans, Rule], Tensor]


@dataclass(frozen=True, slots=True)
class StateContext:
    """core.protocols.RecurrentContext"""

    layer: LayerState
    spans: StateSpans
    rule: Rule
    kernel: Recur

    def recur(self, inputs: Tensor, gates: Tensor, conv: Tensor) -> Tensor:
        return self.kernel(inputs, gates, conv, self.layer, self.spans, self.rule)


class Recurrence:
    def __init__(self, states: States, kernel: Recur = recur) -> None:
        kind = states.kind
        self.states, self.kernel = states, kernel
        self.rule = Rule(kind.key_heads, kind.value_heads, kind.key_dim, kind.value_dim, kind.taps)
        self.layers = [states.layer(number) for number in range(len(states.state))]

    def plan(self, batch: Batch) -> list[StateContext]:
        """One for each layer. To be called once for each step: the states then count as those after its committed rows."""
        seats, starts, computed = batch.seat_ids, batch.cu_q[:-1], self.states.computed
        begin = batch.index[starts]
        length = batch.last_row - starts + 1
        keep = batch.keep
        spans = StateSpans(
            seats,
            batch.cu_q,
            length,
            (begin - computed[seats]).clamp(min=0, max=self.states.ring.shape[2]),
            begin == 0,
            None if batch.tree is None else batch.tree.parents,
            None if keep is None else keep.after,
            None if keep is None else keep.states + self.states.seats,
            batch.sample_rows.shape[1] - 1,
        )
        computed[seats] = begin + length
        return [StateContext(layer, spans, self.rule, self.kernel) for layer in self.layers]


class MixedLayers:
    """core.protocols.AttentionBackend for models that have both kinds of layers: `attention` plans for those that attend."""

    def __init__(self, layers: Sequence[LayerKind], attention: AttentionBackend, recurrence: Recurrence) -> None:
        self.layers, self.attention, self.recurrence = layers, attention, recurrence
        self.graph_safe, self.exact = attention.graph_safe, attention.exact

    def supports(self, kind: LayerKind) -> bool:
        return not isinstance(kind, Attention) or self.attention.supports(kind)

    def plan(self, batch: Batch) -> list[Context]:
        attending, recurring = iter(self.attention.plan(batch)), iter(self.recurrence.plan(batch))
        return [next(attending) if isinstance(kind, Attention) else next(recurring) for kind in self.layers]
