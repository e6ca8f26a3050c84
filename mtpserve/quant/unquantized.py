"""Weights as they are. On a CPU they are packed once into oneDNN's layout, which nearly doubles the bandwidth of small batches."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.protocols import LinearKernels, LinearMethod

# Below this oneDNN's call costs more than it saves. The rule depends on the shape alone, never on a timing: a weight must
# be multiplied in the same way in every run, or equal requests would differ in the last bits.
MIN_PACKED_BYTES = 1 << 20
PACKED_ROWS = 8  # the row count for which the layout is optimised; others work too


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN lays out weights of this dtype here. In bfloat16 it needs AVX-512 or AVX-NE-CONVERT, and raises without."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def unquantized(kernels: LinearKernels) -> LinearMethod:
    """torch multiplies: it needs none of `kernels`."""
    return Unquantized()


class Unquantized:
    """`module.weight` [outputs, inputs]; `module.bias` [outputs] or None."""

    def finish(self, module: nn.Module) -> None:
        weight = cast(Tensor, module.weight)
        large = weight.numel() * weight.element_size() >= MIN_PACKED_BYTES
        if weight.device.type == "cpu" and large and packs(weight.dtype):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)
            del module.weight
            module.packed = packed

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        packed = module.packed
        # The packed layout is opaque: the whole matrix is unpacked temporarily.
        weight = cast(Tensor, module.weight) if packed is None else cast(Tensor, packed).to_dense()
        return weight.detach()[ids]

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        packed = module.packed
        if packed is None:
            return F.linear(x, cast(Tensor, module.weight), cast("Tensor | None", module.bias))
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, packed, module.bias, "none", [], ""))
