"""The interpreter in less time (interpreter.py): its results, and what it leaves behind; on a GPU the same kernels are compiled."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tests.kernels import interpreter


@triton.jit
def first_not_zero(x, y):
    """Associative, and not commutative."""
    return tl.where(x != 0, x, y)


@triton.jit
def larger(x, place, y, other):
    """The pair of the larger number, the first of equal ones."""
    is_first = (x > y) | ((x == y) & (place < other))
    return tl.where(is_first, x, y), tl.where(is_first, place, other)


@triton.jit
def reduce_kernel(p_x, p_first, p_top, p_place, p_any, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    b_x = tl.load(p_x + o)
    top, place = tl.reduce((b_x, o), AXIS, larger)
    o_out = tl.arange(0, N if AXIS == 0 else M)
    tl.store(p_first + o_out, tl.reshape(tl.reduce(b_x, AXIS, first_not_zero, keep_dims=True), o_out.shape))
    tl.store(p_top + o_out, top)
    tl.store(p_place + o_out, place)
    tl.store(p_any, tl.reduce(tl.reshape(b_x, [M * N]), 0, first_not_zero))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("m", "n"), [(8, 16), (1, 4), (2, 1)])
def test_reductions_by_any_function(device: torch.device, m: int, n: int, axis: int) -> None:
    x = torch.randint(-1, 3, (m, n), generator=torch.Generator().manual_seed(m))
    lines, places = (x.T, torch.arange(m * n).view(m, n).T) if axis == 0 else (x, torch.arange(m * n).view(m, n))
    first = [next((number for number in line if number), line[-1]) for line in lines.tolist()]
    best = [max(zip(line, (-place for place in own), strict=True)) for line, own in zip(lines.tolist(), places.tolist(), strict=True)]
    found = [torch.full((len(lines),), -9, device=device) for _ in range(3)]
    anywhere = torch.full((1,), -9, device=device)
    reduce_kernel[(1,)](x.to(device), *found, anywhere, axis, m, n)
    assert [part.tolist() for part in found] == [first, [top for top, _ in best], [-place for _, place in best]]
    assert anywhere.item() == next((number for number in x.flatten().tolist() if number), 0)


def tensors() -> list[tl.tensor]:
    """A number, two blocks and a pointer of each of some types."""
    values = []
    for kind in (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5):
        numbers = triton.runtime.interpreter._get_np_dtype(kind)
        values += [tl.tensor(TensorHandle(np.ones(1, numbers), kind), kind)]
        values += [tl.tensor(TensorHandle(np.ones(shape, numbers), kind), tl.block_type(kind, shape)) for shape in ([1], [2, 4])]
    pointer = tl.pointer_type(tl.float32)
    return [*values, tl.tensor(TensorHandle(np.ones(1, np.uint64), pointer), pointer)]


def outcome(function: Any, semantic: Any, *operands: Any) -> Any:
    """Types and numbers of both operands, or what is wrong with them."""
    try:
        with np.errstate(all="ignore"):
            results = function(semantic, *operands)
        return [(str(result.type), result.handle.data.dtype, result.handle.data.tolist()) for result in results]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")
@pytest.mark.parametrize("flags", [(), (True, True), (True, False), (False, False, True, True)])
def test_common_types_and_shapes(flags: tuple[bool, ...]) -> None:
    semantic = triton.runtime.interpreter.interpreter_semantic
    types, shapes = type(semantic).binary_op_type_checking_impl, type(semantic).broadcast_impl_value
    for _ in range(2):  # the second time from what is known
        for lhs, rhs in product(tensors(), [*tensors(), True, 0, -1, 300, 1 << 40, 0.5, 1e300, float("inf")]):
            assert outcome(types, semantic, lhs, rhs, *flags) == outcome(types.__wrapped__, semantic, lhs, rhs, *flags)
            assert outcome(types, semantic, rhs, lhs, *flags) == outcome(types.__wrapped__, semantic, rhs, lhs, *flags)
            if isinstance(rhs, tl.tensor):
                assert outcome(shapes, semantic, lhs, rhs) == outcome(shapes.__wrapped__, semantic, lhs, rhs)


@triton.jit
def nested(b_x, FAILS: tl.constexpr):
    tl.static_assert(not FAILS, "on purpose")
    return tl.max(b_x, 0)


@triton.jit
def calls_kernel(p_x, p_out, FAILS: tl.constexpr):
    tl.store(p_out, nested(tl.load(p_x + tl.arange(0, 4)), FAILS) + nested(tl.full([2], 1, tl.int64), False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")
def test_the_language_is_patched_while_a_launch_runs(device: torch.device) -> None:
    """Also where one has failed; and the next one computes what it should."""
    assert isinstance(triton.runtime.interpreter._patch_lang, interpreter.Patches)
    out = torch.zeros(1, dtype=torch.int64)
    for fails in (False, True, False):
        if fails:
            with pytest.raises(triton.runtime.interpreter.InterpreterError, match="on purpose"):
                calls_kernel[(1,)](torch.arange(4), out, True)
        else:
            calls_kernel[(2,)](torch.arange(4), out.zero_(), False)
            assert out.item() == 4
        assert all(tl.core.is_builtin(part) for part in (tl.load, tl.math.exp, tl.tensor.to))
