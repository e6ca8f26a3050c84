"""Products per head of latent attention against torch.bmm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.matrices import heads_linear, pack_heads
from torch import Tensor

TYPES = [torch.float32, torch.bfloat16]
WithThreads = Callable[[int, Callable[[], Any]], Any]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def expected(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, heads, K], weight [heads, K, N]"""
    return torch.bmm(x.double().transpose(0, 1), weight.double()).transpose(0, 1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("weight_type", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "nope", "value", "rank"),
    [(1, 4, 32, 32, 96), (5, 3, 16, 48, 128), (70, 2, 128, 128, 512), (7, 5, 18, 20, 34), (0, 2, 16, 16, 16), (9, 9, 64, 32, 64)],
)
def test_products_per_head(
    rows: int, heads: int, nope: int, value: int, rank: int, dtype: torch.dtype, weight_type: torch.dtype, with_threads: WithThreads
) -> None:
    kv_up = numbers(heads * (nope + value), rank, dtype=weight_type) / rank**0.5
    per_head = kv_up.clone().unflatten(0, (heads, -1))
    k_up, v_up = pack_heads(kv_up, heads, nope)
    in_place = rank % 16 == value % 16 == 0
    assert [each.data.untyped_storage().data_ptr() == kv_up.data_ptr() for each in (k_up, v_up)] == [in_place] * 2
    query = torch.full((rows, heads, nope + 11), torch.nan, dtype=dtype)
    query[..., :nope] = numbers(rows, heads, nope, dtype=dtype)
    seen = numbers(heads, rows, rank, dtype=dtype).transpose(0, 1)
    for x, packed, weight in ((query[..., :nope], k_up, per_head[:, :nope]), (seen, v_up, per_head[:, nope:].mT)):
        wide = torch.full((rows, heads, weight.shape[2] + 3), torch.nan, dtype=dtype)
        one = with_threads(1, partial(heads_linear, x, packed))
        two = with_threads(2, partial(heads_linear, x, packed, wide[..., 3:]))
        tolerance = 1e-4 if dtype == weight_type == torch.float32 else 2e-2
        torch.testing.assert_close(one.double(), expected(x, weight), atol=tolerance, rtol=tolerance)
        assert torch.equal(one, two) and wide[..., :3].isnan().all()
        for row in range(min(rows, 6)):
            assert torch.equal(heads_linear(x[row : row + 1], packed), one[row : row + 1])
