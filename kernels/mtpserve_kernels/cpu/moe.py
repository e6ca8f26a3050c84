"""A mixture of experts: src/moe.h. What it computes, in plain torch: moe/reference.py.

A row's numbers depend neither on the other rows nor on the number of threads: its sum goes over its experts in the order of their numbers.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import PANEL, TYPES, Clamp, Matrix, Output, pack
from mtpserve_kernels.cpu.matrices import Matrices, pack_matrices, padded
from mtpserve_kernels.moe.reference import Clamped


class Router(Structure):
    """src/moe.h. `keeps` holds what it points to."""

    _fields_ = [
        ("weight", Matrix), ("bias", c_void_p), ("top_k", c_int64), ("groups", c_int64), ("top_groups", c_int64), ("renormalise", c_int32),
        ("softmax", c_int32), ("scale", c_float),
    ]  # fmt: skip
    keeps: tuple[Any, ...]


class Experts(Structure):
    """src/moe.h. `keeps` holds what it points to."""

    _fields_ = [
        ("gate_up", Matrices), ("down", Matrices), ("shared_gate_up", Matrix), ("shared_down", Matrix), ("shared_gate", Matrix),
        ("clamp", Clamp), ("squared", c_bool), ("first", c_int64),
    ]  # fmt: skip
    keeps: tuple[Any, ...]


_route = Op("mtp_route", POINTER(Router), c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p, c_void_p)
_mix_experts = Op(
    "mtp_mix_experts", POINTER(Experts), c_void_p, c_void_p, c_int64, c_void_p, c_int32, c_int64, c_int64, c_void_p, POINTER(Output)
)


def pack_router(
    weight: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float, softmax: bool = False,
    of_logits: Tensor | None = None,
) -> Router:  # fmt: skip
    """weight [E, H] float32, H even, packed in place where E is a multiple of 16; bias [E] float32, for the choice alone. Without one, or
    with `softmax`, scores are a softmax and there are no groups. of_logits [E]: a bias of what is scored."""
    number = len(weight)
    assert weight.dtype == torch.float32
    assert groups == 1 if bias is None else (bias.dtype == torch.float32 and bias.shape == (number,) and bias.is_contiguous())
    assert top_k <= number and number % groups == 0 and top_groups <= groups, (number, top_k, groups, top_groups)
    assert top_groups == groups or number // groups >= 2, (number, groups)
    assert groups == 1 or not softmax
    matrix, by_softmax = pack(weight, of_logits), softmax or bias is None
    router = Router(matrix, None if bias is None else bias.data_ptr(), top_k, groups, top_groups, renormalise, by_softmax, scale)
    router.keeps = matrix, bias
    return router


def route(x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """x [T, H] → weights [T, top_k] float32, experts [T, top_k] int64, the best first; of equal ones the lower number.

    Experts whose scores are NaN are chosen only when there are no others.
    """
    rows, matrix = len(x), router.weight
    assert x.shape == (rows, matrix.inputs) and x.stride(1) == 1, (x.shape, x.stride())
    scores = torch.empty(rows, matrix.outputs, dtype=torch.float32)
    weights = torch.empty(rows, router.top_k, dtype=torch.float32)
    experts = torch.empty(rows, router.top_k, dtype=torch.int64)
    _route(byref(router), x, TYPES[x.dtype], x.stride(0), rows, scores, weights, experts)
    return weights, experts


def pack_expert_pair(
    gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None
) -> tuple[Matrices, Matrices]:  # fmt: skip
    """gate_up [E, 2 S, H], or up alone [E, S, H], down [E, H, S], H even, their biases [E, 2 S] and [E, H]; in place where S and H are
    multiples of 16. A shared expert is one with E = 1."""
    size, halves = down.shape[2], gate_up.shape[1] // down.shape[2]
    if size % PANEL:  # zeros after each half
        gate_up = padded(gate_up.detach().unflatten(1, (halves, size)), 2).flatten(1, 2)
        if gate_up_bias is not None:
            gate_up_bias = padded(gate_up_bias.detach().unflatten(1, (halves, size)), 2).flatten(1, 2)
    return pack_matrices(gate_up, gate_up_bias), pack_matrices(padded(down.detach(), 2), down_bias)


def experts_of(
    routed: tuple[Matrices, Matrices], shared: tuple[Matrix, Matrix] | None, gate: Matrix | None = None,
    clamped: Clamped | None = None, squared: bool = False, first: int = 0,
) -> Experts:  # fmt: skip
    """`shared`: gate_up, each half of whole panels, and down, of as many inputs. Its output is multiplied with the sigmoid of `gate`'s
    one output. `clamped`: of the routed experts' gates. `squared`: no expert has a gate, gate_up is up alone, see moe.reference.experts;
    `first`, too."""
    gate_up, down = routed
    beside, halves = shared or (Matrix(), Matrix()), 1 if squared else 2
    assert gate_up.first.outputs == halves * down.first.inputs and gate_up.number == down.number
    assert shared is None or (beside[0].outputs == halves * beside[1].inputs and beside[1].inputs % PANEL == 0)
    assert shared is None or (beside[0].inputs, beside[1].outputs) == (gate_up.first.inputs, down.first.outputs)
    assert all(matrix.bias is None for matrix in beside)
    assert gate is None or (shared is not None and (gate.outputs, gate.inputs) == (1, gate_up.first.inputs))
    made = Experts(gate_up, down, *beside, gate or Matrix(), Clamp(*(clamped or ())), squared, first)
    made.keeps = routed, shared, gate
    return made


def mix_experts(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """x [T, H], weights [T, K] float32, chosen [T, K] int64 → [T, H]: the chosen experts' outputs by their weights, summed in float32,
    and the shared expert's."""
    rows, hidden, top_k = *x.shape, chosen.shape[1]
    assert hidden == experts.gate_up.first.inputs == experts.down.first.outputs and x.stride(1) == 1, (x.shape, x.stride())
    assert weights.shape == chosen.shape == (rows, top_k) and weights.is_contiguous() and chosen.is_contiguous()
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64, (weights.dtype, chosen.dtype)
    inner = torch.empty(rows * (top_k * experts.down.first.inputs + experts.shared_down.inputs), dtype=x.dtype)
    out = torch.empty(rows, hidden, dtype=x.dtype)
    to, kind = Output(out.data_ptr(), hidden, TYPES[out.dtype], False), TYPES[x.dtype]
    _mix_experts(byref(experts), weights, chosen, top_k, x, kind, x.stride(0), rows, inner, byref(to))
    return out
