"""What a row of a span has for inputs, wherever they are: the kernels of recurrent layers read them with this."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inputs_of(
    p_x, p_before, p_ring, req_idx, first, replay, fresh, ring_rows, n, o_c, o, size, C: tl.constexpr, HISTORY: tl.constexpr
):  # fmt: skip
    """Channels o_c of row n, where o < size. Rows are counted from the span's first: those before it wait in the ring, or came before
    these; a request that begins has none."""
    waits = replay + n  # among those that are replayed
    own, old = tl.where(n >= 0, size, 0), tl.where((n < 0) & (waits >= 0), size, 0)
    older = tl.where((n < 0) & (waits < 0) & (fresh == 0), size, 0)
    b = tl.load(p_x + (first + n) * C + o_c, mask=o < own, other=0.0)
    b += tl.load(p_ring + (req_idx * ring_rows + waits) * C + o_c, mask=o < old, other=0.0)
    return b + tl.load(p_before + (req_idx * HISTORY + HISTORY + waits) * C + o_c, mask=o < older, other=0.0)


@triton.jit
def mixed(
    p_x, p_before, p_ring, p_conv, p_parents, req_idx, first, replay, fresh, ring_rows, length, n, channel, o, SIZE: tl.constexpr,
    C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr = False,
):  # fmt: skip
    """silu of the convolution: the channels `channel` + o of row n, where o < SIZE; also of a column of rows n, for a row of channels o.
    With parents: of node n - length + 1 of a tree."""
    b = 0.0
    if BIAS:
        b += tl.load(p_conv + TAPS * C + channel + o, mask=o < SIZE, other=0.0)
    at = n
    for t in tl.static_range(TAPS):
        b_x = inputs_of(p_x, p_before, p_ring, req_idx, first, replay, fresh, ring_rows, at, channel + o, o, SIZE, C, TAPS - 1)
        b += b_x.to(tl.float32) * tl.load(p_conv + (TAPS - 1 - t) * C + channel + o, mask=o < SIZE, other=0.0)
        if p_parents is None:
            at -= 1
        else:
            # Node 0 is the last committed row.
            node = at - length + 1
            parent = tl.load(p_parents + tl.maximum(node - 1, 0)).to(tl.int32)
            at = tl.where(node > 0, length - 1 + parent, at - 1)
    return b / (1.0 + tl.exp(-b))
