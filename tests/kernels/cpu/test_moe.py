"""The router and the experts of a CPU against their references; bit by bit the same alone, among other rows and on any number of
threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.linear import linear, pack, pack_int8, quantize
from mtpserve_kernels.cpu.matrices import pack_matrices
from mtpserve_kernels.cpu.moe import Experts, experts_of, mix_experts, pack_expert_pair, pack_router, route
from mtpserve_kernels.moe import reference
from torch import Tensor

from tests.kernels.routes import ROUTES

TYPES = [torch.float32, torch.bfloat16]
WithThreads = Callable[[int, Callable[[], Any]], Any]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def among_nan(x: Tensor) -> Tensor:
    """x with rows further apart, and NaN between them."""
    wide = torch.full((len(x), x.shape[1] + 21), torch.nan, dtype=x.dtype)
    wide[:, 5:-16] = x
    return wide[:, 5:-16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("number", "top", "groups", "top_groups"), ROUTES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 100), (5, 2050), (37, 512), (0, 8)])
def test_route(
    rows: int, hidden: int, number: int, top: int, groups: int, top_groups: int, renormalise: bool, dtype: torch.dtype,
    with_threads: WithThreads,
) -> None:  # fmt: skip
    """No groups: by a softmax."""
    x = among_nan(numbers(rows, hidden, dtype=dtype))
    weight, bias = numbers(number, hidden) / hidden**0.5, numbers(number, seed=1) / 5 if groups else None
    groups, top_groups = groups or 1, top_groups or 1
    choice = top, groups, top_groups, renormalise, 2.5
    expected, best = reference.route(x, weight, bias, *choice)
    router = pack_router(weight, bias, *choice)
    weights, chosen = with_threads(1, lambda: route(x, router))
    assert torch.equal(chosen, best)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    for threads in (2, 3):
        assert all(map(torch.equal, with_threads(threads, lambda: route(x, router)), (weights, chosen)))
    for row in range(min(rows, 6)):
        assert all(map(torch.equal, route(x[row : row + 1], router), (weights[row : row + 1], chosen[row : row + 1])))


def test_of_equal_scores_the_lower_number_wins() -> None:
    x, bias = numbers(2, 16), torch.zeros(24)
    bias[[5, 11, 20]] = 1.0
    for groups, top_groups, best in ((1, 1, [5, 11, 20, 0, 1]), (6, 3, [5, 11, 20, 4, 6]), (6, 2, [5, 11, 4, 6, 7])):
        router = pack_router(torch.zeros(24, 16), bias, 5, groups, top_groups, False, 1.0)
        weights, chosen = route(x, router)
        assert chosen.tolist() == [best] * 2 and (weights == 0.5).all()


def test_a_softmax_over_numbers_far_apart() -> None:
    """Most of them are 0 in float32; what is chosen are the best ones still."""
    weight = torch.zeros(40, 16)
    weight[:, 0] = torch.arange(40) * 60.0
    weights, chosen = route(torch.ones(1, 16), pack_router(weight, None, 3, 1, 1, True, 1.0))
    assert chosen.tolist() == [[39, 38, 37]] and weights.tolist() == [[1.0, pytest.approx(8.7565e-27, rel=1e-4), 0.0]]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (0, 0)])
def test_nan_leads_nowhere(groups: int, top_groups: int) -> None:
    x, weight, bias = numbers(3, 64), numbers(16, 64) / 8, torch.zeros(16) if groups else None
    groups, top_groups = groups or 1, top_groups or 1
    x[1] = torch.nan
    choice = 4, groups, top_groups, True, 1.0
    expected, best = reference.route(x[[0, 2]], weight, bias, *choice)
    weights, chosen = route(x, pack_router(weight.clone(), bias, *choice))
    assert torch.equal(chosen[[0, 2]], best) and weights[1].isnan().all() and len(set(chosen[1].tolist())) == 4
    assert ((chosen >= 0) & (chosen < 16)).all()
    torch.testing.assert_close(weights[[0, 2]], expected)
    weight[3] = torch.nan  # one expert's scores: it is not chosen
    weights, chosen = route(x[:1], pack_router(weight, bias, *choice))
    assert 3 not in chosen and (weights.isnan() if bias is None else weights.isfinite()).all()


def mixture(
    number: int, size: int, hidden: int, shared: int, dtype: torch.dtype, first: int = 0
) -> tuple[list[Tensor | None], Callable[[], Experts]]:  # fmt: skip
    """The weights, and what packs a copy of them: a shared expert is `shared` times as wide as the others."""
    routed = [numbers(number, 2 * size, hidden, dtype=dtype) / 8, numbers(number, hidden, size, dtype=dtype) / 8]
    beside = (
        [numbers(2 * shared * size, hidden, dtype=dtype) / 8, numbers(hidden, shared * size, dtype=dtype) / 8] if shared else [None] * 2
    )

    def packed() -> Experts:
        alone = pack_expert_pair(*(each.clone().unsqueeze(0) for each in beside if each is not None)) if shared else None
        return experts_of(pack_expert_pair(*(each.clone() for each in routed)), alone and (alone[0].first, alone[1].first), first=first)

    return [*routed, *beside], packed


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_some_of_the_experts(rows: int, shared: int, with_threads: WithThreads) -> None:
    """Those with numbers of others add nothing, also where no row chose one that is here."""
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(9, generator=dice)[:3] for _ in range(rows)])
    weights, x = torch.rand(rows, 3, generator=dice), among_nan(numbers(rows, 64))
    for first in (0, 3, 6, 20):
        matrices, packed = mixture(3, 32, 64, shared, torch.float32, first)
        experts = packed()
        actual = with_threads(2, lambda packed=experts: mix_experts(x, weights, chosen, packed))
        torch.testing.assert_close(actual, reference.experts(x, weights, chosen, *matrices, first=first), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
        assert shared or first < 20 or not actual.any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("weight_type", TYPES, ids=str)
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "hidden", "size", "number", "top"),
    [(1, 64, 96, 8, 2), (5, 100, 40, 7, 3), (64, 130, 64, 4, 1), (70, 64, 16, 5, 2), (1, 512, 208, 5, 3), (300, 256, 34, 33, 3)],
)
def test_experts(
    rows: int, hidden: int, size: int, number: int, top: int, shared: int, dtype: torch.dtype, weight_type: torch.dtype,
    with_threads: WithThreads,
) -> None:  # fmt: skip
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)])
    weights = torch.rand(rows, top, generator=dice)
    matrices, packed = mixture(number, size, hidden, shared, weight_type)
    unused = [expert for expert in range(number) if not (chosen == expert).any()]
    for matrix in matrices[:2]:
        assert matrix is not None
        matrix[unused] = torch.nan  # an expert that no row chose is not read
    x = among_nan(numbers(rows, hidden, dtype=dtype))
    experts = packed()
    actual = with_threads(1, lambda: mix_experts(x, weights, chosen, experts))
    tolerance = 1e-4 if dtype == weight_type == torch.float32 else 3e-2
    expected = reference.experts(x, weights, chosen, *matrices)  # type: ignore[arg-type]
    # Units for bfloat16 round both factors, and small sums of large products are off as much as large ones.
    scale = max(1.0, float(expected.abs().mean()))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)
    for threads in (2, 3):
        assert torch.equal(actual, with_threads(threads, lambda: mix_experts(x, weights, chosen, experts)))
    for first, end in ((0, 1), (rows // 2, rows // 2 + 1), (rows // 3, rows)):
        some = slice(first, end)
        assert torch.equal(mix_experts(x[some], weights[some], chosen[some], experts), actual[some])
    backwards = chosen.flip(1)
    assert torch.equal(mix_experts(x, weights.flip(1).contiguous(), backwards.contiguous(), experts), actual), "by number, not by rank"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("clamped", [None, (1.702, 1.1, 0.7, 0.4), (1.0, 0.8, 0.8, 0.0)], ids=["silu", "clamped", "clamped silu"])
@pytest.mark.parametrize(("rows", "hidden", "size", "number", "top"), [(1, 64, 96, 8, 2), (5, 100, 40, 7, 3), (300, 256, 34, 33, 3)])
def test_experts_with_biases(
    rows: int, hidden: int, size: int, number: int, top: int, clamped: reference.Clamped | None, dtype: torch.dtype,
    with_threads: WithThreads,
) -> None:  # fmt: skip
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)])
    weights = torch.rand(rows, top, generator=dice)
    shapes = (number, 2 * size, hidden), (number, hidden, size), (number, 2 * size), (number, hidden)
    matrices = [numbers(*shape, dtype=dtype) / 8 for shape in shapes]
    for each in matrices:
        each[[expert for expert in range(number) if not (chosen == expert).any()]] = torch.nan
    x = among_nan(numbers(rows, hidden, dtype=dtype))
    experts = experts_of(pack_expert_pair(*(each.clone() for each in matrices)), None, None, clamped)
    actual = with_threads(1, lambda: mix_experts(x, weights, chosen, experts))
    expected = reference.experts(x, weights, chosen, *matrices[:2], *[None] * 6, *matrices[2:], clamped)  # type: ignore[arg-type]
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().mean())))
    assert torch.equal(actual, with_threads(3, lambda: mix_experts(x, weights, chosen, experts)))
    assert torch.equal(mix_experts(x[-1:], weights[-1:], chosen[-1:], experts), actual[-1:])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("rows", "hidden", "size", "number", "top"), [(1, 64, 96, 8, 2), (5, 100, 40, 7, 3), (300, 256, 34, 33, 3)])
def test_experts_without_a_gate(
    rows: int, hidden: int, size: int, number: int, top: int, shared: bool, dtype: torch.dtype, with_threads: WithThreads
) -> None:  # fmt: skip
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)])
    weights = torch.rand(rows, top, generator=dice)
    routed = [numbers(number, size, hidden, dtype=dtype) / 8, numbers(number, hidden, size, dtype=dtype) / 8]
    beside = [numbers(48, hidden, dtype=dtype) / 8, numbers(hidden, 48, dtype=dtype) / 8] if shared else [None, None]
    alone = pack_expert_pair(*(each.clone().unsqueeze(0) for each in beside if each is not None)) if shared else None
    matrices = alone and (alone[0].first, alone[1].first)
    experts = experts_of(pack_expert_pair(*(each.clone() for each in routed)), matrices, squared=True)
    x = among_nan(numbers(rows, hidden, dtype=dtype))
    actual = with_threads(1, lambda: mix_experts(x, weights, chosen, experts))
    expected = reference.experts(x, weights, chosen, *routed, *beside, squared=True)  # type: ignore[arg-type]
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().mean())))
    assert torch.equal(actual, with_threads(3, lambda: mix_experts(x, weights, chosen, experts)))
    assert torch.equal(mix_experts(x[-1:], weights[-1:], chosen[-1:], experts), actual[-1:])


def test_a_clamp_lets_nan_through() -> None:
    gate_up, down = numbers(2, 32, 16), torch.ones(2, 16, 16)
    gate_up[1, 3] = torch.nan
    experts = experts_of(pack_expert_pair(gate_up, down), None, None, (1.702, 7.0, 7.0, 1.0))
    out = mix_experts(numbers(2, 16), torch.ones(2, 1), torch.tensor([[0], [1]]), experts)
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("kind", ["choice", "logits"])
@pytest.mark.parametrize(("rows", "hidden", "number", "top"), [(1, 100, 8, 2), (5, 2050, 33, 3), (37, 512, 128, 8)])
def test_a_softmax_with_a_bias(rows: int, hidden: int, number: int, top: int, kind: str, renormalise: bool) -> None:
    x, weight, bias = among_nan(numbers(rows, hidden)), numbers(number, hidden) / hidden**0.5, numbers(number, seed=1) / 5
    of_choice, of_logits = (bias / 10, None) if kind == "choice" else (None, bias)
    expected, best = reference.route_softmax(x, weight, of_choice, of_logits, top, renormalise, 2.5)
    router = pack_router(weight, of_choice, top, 1, 1, renormalise, 2.5, True, of_logits)
    weights, chosen = route(x, router)
    assert torch.equal(chosen, best)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, route(x[-1:], router), (weights[-1:], chosen[-1:])))


def test_no_rows() -> None:
    experts = mixture(4, 16, 32, 1, torch.float32)[1]()
    nothing = torch.zeros(0, 2)
    assert mix_experts(torch.zeros(0, 32), nothing, nothing.long(), experts).shape == (0, 32)


def test_whole_panels_are_packed_in_place() -> None:
    gate_up, down = numbers(3, 64, 48), numbers(3, 48, 32)
    pair = pack_expert_pair(gate_up, down)
    assert [each.data.data_ptr() for each in pair] == [gate_up.data_ptr(), down.data_ptr()]


def test_a_shared_expert_may_be_int8(with_threads: WithThreads) -> None:
    """Each member computes its own outputs of it: by their scales."""
    hidden, size = 200, 48
    shared = [pack_int8(*quantize(numbers(*shape) / 10)) for shape in ((2 * size, hidden), (hidden, size))]
    routed = pack_expert_pair(torch.zeros(2, 32, hidden), torch.zeros(2, hidden, 16))
    x, weights, chosen = numbers(7, hidden), torch.ones(7, 1), torch.zeros(7, 1, dtype=torch.int64)
    expected = linear(linear(x, shared[0], gated=True), shared[1])
    experts = experts_of(routed, (shared[0], shared[1]))
    for threads in (1, 2, 3):
        assert with_threads(threads, lambda: mix_experts(x, weights, chosen, experts)).equal(expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("weight_type", [*TYPES, torch.int8], ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 102), (5, 64), (70, 200)])
def test_a_shared_expert_with_a_gate(
    rows: int, hidden: int, dtype: torch.dtype, weight_type: torch.dtype, with_threads: WithThreads
) -> None:  # fmt: skip
    kind = torch.float32 if weight_type == torch.int8 else weight_type
    matrices, _ = mixture(5, 32, hidden, 2, kind)
    gate = numbers(1, hidden, dtype=kind) / hidden**0.5
    x, weights, chosen = among_nan(numbers(rows, hidden, dtype=dtype)), torch.zeros(rows, 2), torch.tensor([[0, 1]] * rows)
    expected = reference.experts(x, weights, chosen, *matrices).float() * (x.float() @ gate.float().T).sigmoid()  # type: ignore[arg-type]

    def packed() -> Experts:
        gate_up, down, *beside = (each.clone() for each in matrices if each is not None)
        alone = pack_expert_pair(*(each.unsqueeze(0) for each in beside))
        gated = pack_int8(*quantize(gate.clone())) if weight_type == torch.int8 else pack(gate.clone())
        return experts_of(pack_expert_pair(gate_up, down), (alone[0].first, alone[1].first), gated)

    experts = packed()
    actual = with_threads(1, lambda: mix_experts(x, weights, chosen, experts))
    tolerance = 1e-4 if dtype == weight_type == torch.float32 else 3e-2
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().mean())))
    assert with_threads(3, lambda: mix_experts(x, weights, chosen, experts)).equal(actual)
    assert mix_experts(x[-1:], weights[-1:], chosen[-1:], experts).equal(actual[-1:])


def test_many_int8_matrices_are_refused() -> None:
    with pytest.raises(AssertionError, match="scale"):
        pack_matrices(torch.zeros(2, 16, 16, dtype=torch.int8))
