"""Moving a tree's path together, in place."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.cache import reference
from mtpserve_kernels.cache.compact import compact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 576), (3, 80), (8, 256)])
def test_paths_overlap_with_where_they_go(device: torch.device, heads: int, dim: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(dim)
    pool = torch.randn(3, 40, heads, dim, generator=dice).to(device, dtype)
    # Slots of four requests, ten each; a path is an increasing choice of nodes, its end repeated, or nothing.
    base = torch.randperm(40, generator=dice).view(4, 10)
    paths = torch.tensor([[1, 2, 3, 4], [2, 3, 5, 9], [3, 3, 3, 3], [1, 4, 4, 4]])
    source, target = base.gather(1, paths), base[:, 1:5].clone()
    repeated = torch.tensor([[False] * 4, [False] * 4, [False, True, True, True], [False, False, True, True]])
    source[repeated] = target[repeated] = -1
    wanted = pool.clone()
    reference.compact(wanted, source.to(device), target.to(device))
    compact(pool, source.contiguous().to(device), target.contiguous().to(device))
    assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))
    assert not torch.equal(pool.float(), torch.zeros(()))
