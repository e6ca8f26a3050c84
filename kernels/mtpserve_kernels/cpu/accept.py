"""The verdict over drafts, drafts from logits, and the largest of each row, for a CPU: src/accept.cpp, src/sample.h.

The laws are those of mtpserve_kernels.spec.reference, and so is the noise, bit by bit. Exponentials and sums are rounded otherwise, a few
units in the last place: a token can differ from the reference's only where two of them are that close in the race, or one is that close
to a cut. A request's numbers depend neither on the other requests nor on the number of threads.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op


class Drafted(Structure):
    _fields_ = [
        ("requests", c_int64), ("nodes", c_int64), ("vocab", c_int64), ("logits", c_void_p), ("drafts", c_void_p), ("count", c_void_p),
        ("parents", c_void_p), ("parents_stride", c_int64), ("seats", c_void_p), ("length", c_void_p), ("q", c_void_p),
        ("q_stride", c_int64), ("q_nodes", c_int64),
    ]  # fmt: skip


class Decision(Structure):
    _fields_ = [("depth", c_int64), ("tokens", c_void_p), ("path", c_void_p), ("accepted", c_void_p), ("failed", c_void_p)]


class Proposed(Structure):
    _fields_ = [
        ("rows", c_int64), ("vocab", c_int64), ("logits", c_void_p), ("stride", c_int64), ("seats", c_void_p), ("index", c_void_p),
        ("q", c_void_p), ("q_stride", c_int64), ("tokens", c_void_p),
    ]  # fmt: skip


class Sampling(Structure):
    _fields_ = [(name, c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "coupled")]


_accept = Op("mtp_accept", POINTER(Drafted), POINTER(Sampling), POINTER(Decision))
_argmax = Op("mtp_argmax", c_void_p, c_int64, c_int64, c_int64, c_void_p)
_draw = Op("mtp_draw", POINTER(Proposed), POINTER(Sampling))


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def sampling_of(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, coupled: Tensor | None) -> Sampling:
    """Of each seat; `coupled` None: all are. It keeps none of them alive."""
    return Sampling(*[part.data_ptr() for part in (temperature, top_k, top_p, min_p, seed)], address(coupled))


def accept(
    logits: Tensor, drafts: Tensor, num_draft_tokens: Tensor, parents: Tensor | None, depths: Tensor | None, seats: Tensor, length: Tensor,
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, coupled: Tensor, draft_probs: Tensor | None,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See mtpserve_kernels.spec.accept.accept. Rows of nodes that are not on a request's path are not read; `depths` neither: the walk
    counts. After a request's end its tokens are 0."""
    requests, nodes, vocab = logits.shape
    q = draft_probs if nodes > 1 else None
    assert logits.is_contiguous() and logits.dtype == torch.float32 and drafts.shape == (requests, nodes - 1), (logits.shape, drafts.shape)
    assert q is None or (q.shape[2] == vocab and q.stride(1) == vocab and q.stride(2) == 1), (q.shape, q.stride())
    assert parents is None or parents.stride(1) == 1 or nodes < 3, parents.stride()
    tokens, path = (torch.empty(requests, depth + 1, dtype=torch.int64) for _ in range(2))
    accepted, failed = torch.empty(requests, dtype=torch.int64), torch.empty(requests, dtype=torch.bool)
    q_stride, q_nodes = (0, 0) if q is None else (q.stride(0), q.shape[1])
    drafts, num_draft_tokens, seats = drafts.contiguous(), num_draft_tokens.contiguous(), seats.contiguous()
    given = Drafted(
        requests, nodes, vocab, logits.data_ptr(), drafts.data_ptr(), num_draft_tokens.data_ptr(), address(parents),
        0 if parents is None else parents.stride(0), seats.data_ptr(), length.data_ptr(), address(q), q_stride, q_nodes,
    )  # fmt: skip
    sampling = sampling_of(temperature, top_k, top_p, min_p, seed, coupled)
    out = Decision(depth, tokens.data_ptr(), path.data_ptr(), accepted.data_ptr(), failed.data_ptr())
    _accept(byref(given), byref(sampling), byref(out))
    return tokens, accepted, path, failed


def draw(
    logits: Tensor, seats: Tensor, index: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor,
    coupled: Tensor | None, q: Tensor | None,
) -> Tensor:  # fmt: skip
    """A draft for each of logits [rows, V] float32; seats and index [rows], index: of the draft; the rest as for accept, by seat.

    → [rows] int64, drawn with the stream DRAFT or, where the seat is coupled, DRAW; what they were drawn from is written to q [rows, V]
    float32. All are coupled where `coupled` is None, and nobody asks what they were drawn from where q is. A NaN counts as 0, inf as the
    largest number, and where all of a row is -inf, all of it as 0.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert q is None or (q.shape == logits.shape and q.dtype == torch.float32 and q.stride(1) == 1), (q.shape, q.dtype, q.stride())
    tokens, q_stride = torch.empty(rows, dtype=torch.int64), 0 if q is None else q.stride(0)
    seats, index = seats.contiguous(), index.contiguous()
    given = Proposed(
        rows, vocab, logits.data_ptr(), logits.stride(0), seats.data_ptr(), index.data_ptr(), address(q), q_stride, tokens.data_ptr()
    )  # fmt: skip
    sampling = sampling_of(temperature, top_k, top_p, min_p, seed, coupled)
    _draw(byref(given), byref(sampling))
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """logits [rows, V] float32 → [rows] int64, as torch.argmax: the first of the largest, and a NaN is larger than all."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _argmax(logits, logits.stride(0), *logits.shape, out)
    return out
