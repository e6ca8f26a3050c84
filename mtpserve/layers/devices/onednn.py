"""Linear layers in oneDNN's packed layout: on a CPU without kernels of our own, it nearly doubles the
bandwidth of small batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

# Below this oneDNN's call costs more than it saves. The rule depends on the shape alone, never on a timing: a
# weight must be multiplied in the same way in every run, or equal requests would differ in the last bits.
MIN_PACKED_BYTES = 1 << 20
PACKED_ROWS = 8  # the row count for which the layout is optimised; others work too


def packs(dtype: torch.dtype) -> bool:
    """True if oneDNN lays out weights of this dtype here. For bfloat16 it needs AVX-512 or AVX-NE-CONVERT,
    and raises without."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(weight: Tensor, bias: Tensor | None, lookups: bool) -> OneDNNMatrix | None:
    """core.protocols.linear.Pack. A matrix whose rows are looked up stays as it is: no single row can be read
    from the packed layout."""
    large = weight.numel() * weight.element_size() >= MIN_PACKED_BYTES
    if lookups or weight.device.type != "cpu" or not large or not packs(weight.dtype):
        return None
    return OneDNNMatrix(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS), bias)


@dataclass(frozen=True, slots=True)
class OneDNNMatrix:
    """core.protocols.Packed"""

    weight: Tensor  # opaque
    bias: Tensor | None

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")).to(
            dtype
        )

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight.to_dense().detach()[ids]
