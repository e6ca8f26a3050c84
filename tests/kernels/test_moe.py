"""The router and the experts against their references."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.moe import experts as module, reference, route as routing
from mtpserve_kernels.moe.experts import experts
from mtpserve_kernels.moe.experts_rows import experts_rows
from mtpserve_kernels.moe.route import route
from torch import Tensor

from mtpserve.core.arch.gates import ClampedGate
from mtpserve.core.arch.model import MoEArch
from mtpserve.layers.kernels import KERNELS
from mtpserve.layers.moe import MoE
from mtpserve.quant.unquantized import Unquantized
from tests import selection
from tests.kernels.routes import ROUTES
from tests.kernels.test_quant import stored_by_row


def numbers(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("number", "top", "groups", "top_groups"), ROUTES)
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_route(device: torch.device, rows: int, number: int, top: int, groups: int, top_groups: int, renormalise: bool) -> None:
    """No groups: by a softmax."""
    x, weight = torch.full((rows, 108), torch.nan, device=device), numbers(device, number, 100) / 10
    x[:, :100] = numbers(device, rows, 100)
    x, bias, groups, top_groups = x[:, :100], numbers(device, number, seed=1) / 5 if groups else None, groups or 1, top_groups or 1
    arguments = (x, weight, bias, top, groups, top_groups, renormalise, 2.5)
    for _ in range(2):  # the counters are as the second launch wants them
        (actual, chosen), (expected, best) = route(*arguments), reference.route(*arguments)
        assert torch.equal(chosen.sort(1).values, best.sort(1).values)
        torch.testing.assert_close(actual.gather(1, chosen.argsort(1)), expected.gather(1, best.argsort(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["choice", "logits"])
@pytest.mark.parametrize(("rows", "number", "top"), [(1, 8, 2), (5, 33, 3), (37, 64, 6), (3, 768, 12)])
def test_a_softmax_with_a_bias(device: torch.device, rows: int, number: int, top: int, kind: str) -> None:
    x, weight, bias = numbers(device, rows, 100), numbers(device, number, 100) / 10, numbers(device, number, seed=1) / 5
    of_choice, of_logits = (bias / 10, None) if kind == "choice" else (None, bias)
    actual, chosen = route(x, weight, of_choice, top, 1, 1, True, 2.5, True, of_logits)
    expected, best = reference.route_softmax(x, weight, of_choice, of_logits, top, True, 2.5)
    assert torch.equal(chosen.sort(1).values, best.sort(1).values)
    torch.testing.assert_close(actual.gather(1, chosen.argsort(1)), expected.gather(1, best.argsort(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softmax", [False, True])
def test_rows_in_bfloat16_are_routed_as_in_float32(device: torch.device, softmax: bool) -> None:
    """The weights are cut into three bfloat16 numbers. A row's bits do not depend on who shares the launch. Interpreted they depend on its
    place among the 16 rows of a product: numpy's do."""
    x, weight = numbers(device, 37, 300).bfloat16(), numbers(device, 40, 300) / 10
    arguments = weight, None if softmax else numbers(device, 40, seed=1) / 5, 6, 1 if softmax else 4, 1 if softmax else 2, True, 2.5
    (actual, chosen), (expected, best) = route(x, *arguments), reference.route(x, *arguments)
    assert torch.equal(chosen, best)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    places = [(0, 1), (0, 8), (16, 37), (32, 33)]
    for first, last in places if device.type == "cpu" else [*places, (3, 8)]:
        alone, alone_chosen = route(x[first:last], *arguments)
        assert torch.equal(alone, actual[first:last]) and torch.equal(alone_chosen, chosen[first:last])


@pytest.mark.parametrize(("rows", "number", "groups"), [(70, 40, 1), (40, 130, 1), (33, 96, 4)])
def test_many_rows_are_routed_as_few(device: torch.device, rows: int, number: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has several splits of the sum then, or one, and more experts: to the bit the same weights, but for numpy's products."""
    x, weight = numbers(device, rows, 700).bfloat16()[:, :600], numbers(device, number, 600) / 10
    bias, cuts, cut_of = None if groups == 1 else numbers(device, number, seed=1) / 5, list[tuple[int, int, int]](), routing.launch_cut

    def watch(*arguments: Any) -> tuple[int, int, int]:
        cuts.append(cut_of(*arguments))
        return cuts[-1]

    monkeypatch.setattr(routing, "launch_cut", watch)
    arguments = weight, bias, 6, groups, max(groups // 2, 1), True, 1.0
    found = []
    for processors in (1, 8, 10_000):
        monkeypatch.setattr(routing, "processors_of", lambda device, processors=processors: processors)
        found.append(route(x, *arguments))
    assert len(set(cuts)) == 3
    expected, best = reference.route(x, *arguments)
    for actual, chosen in found:
        assert torch.equal(chosen, best)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert device.type == "cpu" or torch.equal(actual, found[0][0])


@pytest.mark.parametrize("softmax", [False, True])
def test_nan_leads_nowhere(device: torch.device, softmax: bool) -> None:
    x = numbers(device, 3, 64)
    x[1] = torch.nan
    weight, bias = numbers(device, 16, 64), None if softmax else torch.zeros(16, device=device)
    weights, chosen = route(x, weight, bias, 4, 1, 1, True, 1.0)
    assert ((chosen >= 0) & (chosen < 16)).all() and weights[[0, 2]].isfinite().all()
    assert torch.equal(chosen[[0, 2]].sort(1).values, reference.route(x[[0, 2]], weight, bias, 4, 1, 1, True, 1.0)[1].sort(1).values)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "hidden", "size", "number", "top"), [(1, 64, 96, 8, 2), (5, 100, 40, 7, 3), (64, 130, 64, 4, 1), (70, 64, 16, 5, 2)]
)
def test_experts(device: torch.device, rows: int, hidden: int, size: int, number: int, top: int, shared: int) -> None:
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)]).to(device)
    weights = torch.rand(rows, top, generator=dice).to(device)
    for dtype in (torch.float32, torch.float16):
        gate_up, down = numbers(device, number, 2 * size, hidden).to(dtype) / 8, numbers(device, number, hidden, size).to(dtype) / 8
        shared_expert = (None, None)
        if shared:
            shared_expert = (numbers(device, 2 * shared * size, hidden).to(dtype) / 8, numbers(device, hidden, shared * size).to(dtype) / 8)
        unused = [expert for expert in range(number) if not (chosen == expert).any()]
        gate_up[unused], down[unused] = torch.nan, torch.nan  # an expert that no row chose is not read
        x = numbers(device, rows, hidden + 8).to(dtype)[:, :hidden]
        actual = experts(x, weights, chosen, gate_up, down, *shared_expert)
        expected = reference.experts(x, weights, chosen, gate_up, down, *shared_expert)
        tolerance = 1e-2 if dtype == torch.float16 else 1e-4
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clamped", [None, (1.702, 1.1, 0.7, 0.4)], ids=["silu", "clamped"])
@pytest.mark.parametrize(("rows", "hidden", "size", "number", "top"), [(1, 64, 96, 8, 2), (5, 100, 40, 7, 3), (70, 64, 16, 5, 2)])
def test_experts_with_biases(
    device: torch.device, rows: int, hidden: int, size: int, number: int, top: int, clamped: reference.Clamped | None
) -> None:
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)]).to(device)
    weights = torch.rand(rows, top, generator=dice).to(device)
    gate_up, down = numbers(device, number, 2 * size, hidden) / 8, numbers(device, number, hidden, size) / 8
    biases = numbers(device, number, 2 * size), numbers(device, number, hidden)
    for part in (gate_up, down, *biases):
        part[[expert for expert in range(number) if not (chosen == expert).any()]] = torch.nan
    x = numbers(device, rows, hidden)
    arguments = x, weights, chosen, gate_up, down, None, None, None, None, None, None, *biases, clamped
    actual, expected = experts(*arguments), reference.experts(*arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    if clamped is not None:
        gate_up[chosen[0, 0], [0, size]] = torch.nan  # a gate and an up that are NaN are not clamped
        assert experts(*arguments)[(chosen == chosen[0, 0]).any(1)].isnan().all()


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_without_a_gate(device: torch.device, shared: int) -> None:
    rows, hidden, size, number, top = 5, 100, 40, 7, 3
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)]).to(device)
    weights = torch.rand(rows, top, generator=dice).to(device)
    x, up, down = numbers(device, rows, hidden), numbers(device, number, size, hidden) / 8, numbers(device, number, hidden, size) / 8
    beside = (numbers(device, shared * size, hidden) / 8, numbers(device, hidden, shared * size) / 8) if shared else (None, None)
    stored, expected = [], [reference.experts(x, weights, chosen, up, down, *beside, squared=True)]
    if not shared:  # in float8, of which gate and up would begin blocks of their own; and with a scale for each row
        (up8, scale), rows8 = in_float8(up), stored_by_row(device, tuple(up.shape), 1, "float8")
        stored = [(up8, down, None, None, scale), (*rows8, down, None, None, None)]
        expected += [reference.experts(x, weights, chosen, *stored[0], squared=True)]
        expected += [reference.experts_rows(x, weights, chosen, *stored[1], squared=True)]
    actual = [experts(x, weights, chosen, up, down, *beside, squared=True)]
    actual += [mix(x, weights, chosen, *given, squared=True) for mix, given in zip((experts, experts_rows), stored, strict=False)]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    up[chosen[0, 0], 0] = torch.nan
    assert experts(x, weights, chosen, up, down, *beside, squared=True)[(chosen == chosen[0, 0]).any(1)].isnan().all()


def test_an_experts_weights_are_read_by_one_program_after_the_other(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU starts programs along the first axis of the grid first. In that order all row tiles that need a tile of weights follow one
    another, so that it comes from memory once and from the cache after that."""
    if device.type == "cuda":
        pytest.skip("reads are watched in the interpreter")
    from triton.runtime.interpreter import InterpreterBuilder

    rows, hidden, size, number = 60, 96, 130, 3
    gate_up, down = numbers(device, number, 2 * size, hidden) / 8, numbers(device, number, hidden, size) / 8
    chosen = torch.tensor([[row % 3, (row + 1) % 3] for row in range(rows)])
    reads: dict[str, dict[tuple[int, ...], set[int]]] = {"gate_up": {}, "down": {}}
    load = InterpreterBuilder.create_masked_load

    def watched(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        first = int(pointers.data[mask.data].min()) if mask.data.any() else 0
        for name, matrix in (("gate_up", gate_up), ("down", down)):
            if 0 <= first - matrix.data_ptr() < matrix.nbytes:
                reads[name].setdefault(self.grid_idx, set()).add(first)
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    experts(numbers(device, rows, hidden), torch.rand(rows, 2), chosen, gate_up, down, None, None)
    tiles = -(-rows // module.tiling(rows, 4, False).BT)
    assert tiles > 2
    for programs in reads.values():
        order = [frozenset(programs[place]) for place in sorted(programs, key=lambda place: place[::-1])]
        runs = [next(run) for _, run in groupby(order)]
        assert len(runs) == len(set(order)) == len(order) // tiles and len(runs) > number


def test_counters_are_left_at_zero(device: torch.device) -> None:
    """Also where no expert is hit, or one twice: the next launch would be wrong."""
    x, gate_up, down = numbers(device, 3, 64), numbers(device, 4, 64, 64) / 8, numbers(device, 4, 64, 32) / 8
    weights, chosen = torch.rand(3, 2).to(device), torch.tensor([[0, 1], [2, 3], [3, 0]], device=device)
    for others, first in ((chosen + 4, 0), (torch.full_like(chosen, 1), None), (chosen, 2)):
        experts(x, weights, others, gate_up, down, None, None, first=first)
        assert not any(arrival_counters("experts", 1, device).tolist())
    expected = reference.experts(x, weights, chosen, gate_up, down, None, None)
    torch.testing.assert_close(experts(x, weights, chosen, gate_up, down, None, None), expected, rtol=1e-4, atol=1e-4)
    assert not experts(x, weights, chosen + 4, gate_up, down, None, None, first=0).any()


def in_float8(matrix: Tensor, parts: int = 1) -> tuple[Tensor, Tensor]:
    """[..., rows, columns] → float8 and its scales; each of the `parts` begins blocks of its own. Numbers with no more than e4m3's bits:
    the interpreter's conversion is exact on them."""
    *_, rows, columns = matrix.shape
    shape = (*matrix.shape[:-2], parts * -(-rows // parts // 128), -(-columns // 128))
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(rows)) * 0.1 + 0.05
    return (matrix * 2).round().clamp(-8, 8).to(torch.float8_e4m3fn), scale.to(matrix.device)


@pytest.mark.covering(1)  # whose last case is one of two shared experts
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize(("rows", "hidden", "size", "number", "top"), [(1, 64, 96, 8, 2), (70, 130, 136, 2, 1), (5, 300, 128, 7, 3)])
def test_float8_experts(device: torch.device, rows: int, hidden: int, size: int, number: int, top: int, shared: int) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 before sm_89")
    if shared > 1 and size % 128:
        pytest.skip("the shared expert's blocks would not be an expert's")
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)]).to(device)
    weights = torch.rand(rows, top, generator=dice).to(device)
    gate_up, down = in_float8(numbers(device, number, 2 * size, hidden), 2), in_float8(numbers(device, number, hidden, size))
    shared_expert: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 2
    if shared:
        shared_expert = [in_float8(numbers(device, 2 * shared * size, hidden), 2), in_float8(numbers(device, hidden, shared * size))]
    matrices, scales = zip(gate_up, down, *shared_expert, strict=True)
    for dtype in (torch.float32, torch.float16):
        x = (numbers(device, rows, hidden) / 16).to(dtype)
        actual, expected = experts(x, weights, chosen, *matrices, *scales), reference.experts(x, weights, chosen, *matrices, *scales)
        tolerance = 1e-2 if dtype == torch.float16 else 1e-4
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    mixed = experts(x, weights, chosen, gate_up[0], down[0].to(dtype), None, None, gate_up[1])  # decided per matrix
    torch.testing.assert_close(
        mixed, reference.experts(x, weights, chosen, gate_up[0], down[0].to(dtype), None, None, gate_up[1]), rtol=1e-2, atol=1e-2
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "forms", [("float8", "float8"), ("int4", "nvfp4"), ("nvfp4", "int4"), ("zeros", "mxfp4"), ("mxfp4", None), (None, "float8")], ids=str
)
@pytest.mark.parametrize(
    ("rows", "hidden", "size", "number", "top", "groups"), [(5, 192, 64, 5, 3, 2), (1, 64, 96, 8, 2, 1), (20, 128, 128, 3, 1, 4)]
)
def test_experts_with_scales_by_row(
    device: torch.device, rows: int, hidden: int, size: int, number: int, top: int, groups: int, forms: tuple[str | None, str | None]
) -> None:  # fmt: skip
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 before sm_89")
    dice = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)]).to(device)
    weights = torch.rand(rows, top, generator=dice).to(device)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 1e-2)):
        x = (numbers(device, rows, hidden) / 16).to(dtype)
        matrices: list[Tensor | None] = []
        for form, shape in zip(forms, ((number, 2 * size, hidden), (number, hidden, size)), strict=True):
            whole = (numbers(device, *shape).to(dtype), None, None, None)
            matrices += whole if form is None else stored_by_row(device, shape, groups, form)
        biases = numbers(device, number, 2 * size).to(dtype), numbers(device, number, hidden).to(dtype)
        plain, biased = (), (*biases, (1.7, 0.5, 0.5, 1.0))
        for more in (plain, biased) if selection.ALL else (biased,) if dtype == torch.float16 else (plain,):
            actual, expected = (mix(x, weights, chosen, *matrices, *more) for mix in (experts_rows, reference.experts_rows))
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("rows", [1, 20])
def test_some_of_the_experts(device: torch.device, rows: int, shared: int) -> None:
    """Those with numbers of others add nothing, and all parts together are the whole. Room that nobody has written may be NaN."""
    (hidden, size, number, top), dice = (64, 32, 9, 3), torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(number, generator=dice)[:top] for _ in range(rows)]).to(device)
    chosen[0] = torch.arange(top, device=device)  # of the last part this row has none
    weights, x = torch.rand(rows, top, generator=dice).to(device), numbers(device, rows, hidden)
    gate_up, down = numbers(device, number, 2 * size, hidden) / 8, numbers(device, number, hidden, size) / 8
    beside = (numbers(device, 2 * shared * size, hidden) / 8, numbers(device, hidden, shared * size) / 8) if shared else (None, None)
    by_row = [stored_by_row(device, shape, 1, "int4") for shape in (gate_up.shape, down.shape)]
    whole = reference.experts(x, weights, chosen, gate_up, down, None, None)
    whole_by_row = reference.experts_rows(x, weights, chosen, *by_row[0], *by_row[1])
    alone, sums = reference.experts(x, 0 * weights, chosen, gate_up, down, *beside), [torch.zeros_like(x), torch.zeros_like(x)]
    for first in range(0, number, 3):
        own, mine = (gate_up[first : first + 3], down[first : first + 3]), slice(first, first + 3)
        rest = torch.full((rows * 64, 100), torch.nan, device=device)
        del rest  # what is allocated next gets this memory
        actual = experts(x, weights, chosen, *own, *beside, first=first)
        torch.testing.assert_close(
            actual, reference.experts(x, weights, chosen, *own, *beside, first=first), rtol=1e-4, atol=1e-4, equal_nan=False
        )
        parts = [None if part is None else part[mine].contiguous() for matrix in by_row for part in matrix]
        sums[0], sums[1] = sums[0] + actual - alone, sums[1] + experts_rows(x, weights, chosen, *parts, first=first)
    torch.testing.assert_close(sums[0], whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[1], whole_by_row, rtol=1e-4, atol=1e-3)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    x, gate_up, down = numbers(device, 9, 64), numbers(device, 6, 32, 64), numbers(device, 6, 64, 16)
    chosen = torch.tensor([[i % 6, (i + 2) % 6] for i in range(9)], device=device)
    weights = torch.rand(9, 2, device=device)
    whole = experts(x, weights, chosen, gate_up, down, None, None)
    for i in range(9):
        assert torch.equal(experts(x[i : i + 1], weights[i : i + 1], chosen[i : i + 1], gate_up, down, None, None), whole[i : i + 1])


@pytest.mark.parametrize("shared", [16, 32, 24], ids=["as wide as one", "as two", "as neither"])
@pytest.mark.parametrize("limits", [None, ClampedGate(1.0, 0.3, 0.2, 0.0)], ids=["plain", "with limits"])
@pytest.mark.parametrize("name", ["triton", "cpu"])
def test_a_shared_expert(device: torch.device, name: str, limits: ClampedGate | None, shared: int) -> None:
    if name == "cpu":
        pytest.importorskip("mtpserve_kernels.cpu.library")
    where = device if name == "triton" else torch.device("cpu")
    arch = MoEArch(4, 2, 16, shared, (), 1, 1, 1.0, True, beside=limits)
    x, found = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)), []
    for kernels in (KERNELS.get("torch")(), KERNELS.get(name)()):
        layer, dice = MoE(32, arch, 0, Unquantized(kernels), kernels), torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=dice).to(where) / 4
        for part in reversed(list(layer.modules())):
            if hasattr(part, "finish_loading"):
                part.finish_loading()
        found.append(layer(x.to(where)))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
