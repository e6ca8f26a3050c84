"""A step's rows of a draft model and all drafts of a chain in one call: src/chain.cpp, whose structs these are."""

from __future__ import annotations

from ctypes import POINTER, Array, Structure, addressof, byref, c_bool, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from mtpserve_kernels.cpu.accept import Sampling
from mtpserve_kernels.cpu.attention import Spans
from mtpserve_kernels.cpu.fused import Norm, Rotation
from mtpserve_kernels.cpu.layers import Context, Contexts, Fusion, Layer, Pass
from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES, Matrix


class Absorbed(Structure):
    _fields_ = [
        ("rows", c_int64), ("requests", c_int64), ("ids", c_void_p), ("index", c_void_p), ("slots", c_void_p),
        ("seats", c_void_p), ("query_start_loc", c_void_p), ("seq_lens", c_void_p), ("features", c_void_p), ("stride", c_int64),
        ("last", c_void_p), ("split", c_bool),
    ]  # fmt: skip


class Chain(Structure):
    """`kept` keeps what it points to."""

    _fields_ = [
        ("layer", c_void_p), ("context", Context), ("layer_pass", Pass), ("head", c_void_p), ("normed", c_bool), ("spans", Spans),
        ("length", c_void_p), ("steps", c_int64), ("absorbed", Absorbed), ("greedy", c_bool), ("sampling", Sampling), ("q", c_void_p),
        ("tokens", c_void_p),
    ]  # fmt: skip
    kept: object
    vocab: int


def chain_of(
    layer: Array[Layer], contexts: Contexts, fusion: Fusion, embedding: Tensor, last: Norm, head: Matrix, cos: Tensor, sin: Tensor,
    interleaved: bool, spans: Spans, normed: bool,
) -> Chain:  # fmt: skip
    """A draft model as `run_fused` runs it, with its embedding [V, H], rotary tables and head; `spans`: what batches of its store have in
    common. Its rows know the token after them. `normed`: a pass gets of the one before it what the head gets, and otherwise what was there
    before the norm `last`."""
    assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    assert len(layer) == 1 and embedding.is_contiguous() and head.inputs == embedding.shape[1]
    made = Chain(layer=addressof(layer), context=contexts.array[0], head=head.address, normed=normed, spans=spans)
    made.layer_pass = Pass(
        hidden=embedding.shape[1], type=TYPES[embedding.dtype], fusion=addressof(fusion), embedding=embedding.data_ptr(), last=last,
        rotation=Rotation(None, cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1], interleaved),
    )  # fmt: skip
    made.spans.shift = 1
    made.kept, made.vocab = (layer, contexts, fusion, embedding, head, cos, sin), head.outputs
    return made


_chain = Op("mtp_chain", POINTER(Chain))


class StepRows(NamedTuple):
    """Of T rows of R requests: int64, in the order in which Absorbed has their addresses."""

    ids: Tensor  # [T]
    places: Tensor  # [T], in their requests
    slots: Tensor  # [T]
    seats: Tensor  # [R]
    query_start_loc: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]


def drafts(
    model: Chain, steps: int, rows: StepRows, features: Tensor, last: Tensor, split: bool, seats: Tensor, length: Tensor,
    block_table: Tensor, sampling: Sampling | None, drawn: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`rows` that the layer computes, with features [T, H]; with `split` of all their keys and values alone, and then the last ones again.
    `last` [D]: in which of them the requests end that are drafted for, seats [D], length and block_table by seat: int64 → drafts [D,
    steps], and where they are `drawn` what from [D, steps, V] float32. `sampling` None: each is the largest."""
    requests, (number, hidden) = seats.shape[0], features.shape
    step = Chain.from_buffer_copy(model)
    assert hidden == model.layer_pass.hidden and features.stride(1) == 1 and TYPES[features.dtype] == model.layer_pass.type
    assert (
        block_table.stride(1) == 1
        and length.dtype == block_table.dtype == torch.int64
        and rows.query_start_loc.shape[0] == rows.seats.shape[0] + 1
    )
    for x in (*rows, last, seats):
        assert x.dtype == torch.int64 and x.is_contiguous(), (x.dtype, x.stride())
    assert rows.ids.shape == rows.places.shape == rows.slots.shape == (number,) and last.shape == (requests,)
    tokens = torch.empty(requests, steps, dtype=torch.int64)
    q = torch.empty(requests, steps, model.vocab) if drawn else None
    step.steps, step.length = steps, length.data_ptr()
    step.absorbed = Absorbed(
        number, rows.seats.shape[0], *[x.data_ptr() for x in rows], features.data_ptr(), features.stride(0), last.data_ptr(), split
    )
    spans = step.spans
    spans.requests, spans.seats = requests, seats.data_ptr()
    spans.block_table, spans.table_stride = block_table.data_ptr(), block_table.stride(0)
    step.greedy = sampling is None
    if sampling is not None:
        step.sampling = sampling
    step.tokens, step.q = tokens.data_ptr(), None if q is None else q.data_ptr()
    _chain(byref(step))
    return tokens, q
