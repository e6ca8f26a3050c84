"""A linear layer. How its weights are stored and multiplied is the business of its method: see quant/."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpserve.core.protocols.linear import AddAdapters, LinearKernels, LinearMethod, Packed
from mtpserve.quant.unquantized import Unquantized


class Linear(nn.Module):
    """y = x W^T + b. `parts` are the row counts of the matrices that one fused W holds, in order (q, k, v;
    gate, up)."""

    # parameters that weights/blocks may replace by what is stored
    may_hold_blocks: tuple[str, ...] = ("weight",)
    # row counts of what ranks divide each for itself, where that is not `parts`
    cuts: tuple[int, ...] | None = None
    packs: tuple[str, ...] = ("weight", "bias")  # the parameters that `finish_loading` reads
    added_once: tuple[str, ...] = ()  # what only the first rank has, because the ranks' outputs are summed

    def __init__(self, inputs: int, parts: tuple[int, ...], method: LinearMethod, bias: bool = False) -> None:
        super().__init__()
        self.parts, self.method = parts, method
        self.weight = nn.Parameter(torch.empty(sum(parts), inputs), requires_grad=False)
        self.weight_scale_inv: nn.Parameter | None
        self.weight_zeros: nn.Parameter | None
        self.weight_global_scale: nn.Parameter | None
        for name in ("weight_scale_inv", "weight_zeros", "weight_global_scale"):
            self.register_parameter(name, None)
        self.bias = nn.Parameter(torch.empty(sum(parts)), requires_grad=False) if bias else None
        self.packed: Packed | None = None
        self.adapters: AddAdapters | None = None  # what rows may have besides, see devices/lora.py

    def finish_loading(self) -> None:
        self.method.finish(self)

    def rows(self, ids: Tensor) -> Tensor:
        return self.method.rows(self, ids)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [T, inputs] → [T, outputs] of `dtype`, by default x's."""
        y = self.method.apply(self, x, dtype)
        return y if self.adapters is None else self.adapters(x, y)


def in_float32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)


class Float32Linear(Linear):
    """A small matrix that is computed with in float32, whatever the others are."""

    may_hold_blocks = ()

    def __init__(self, inputs: int, outputs: int, kernels: LinearKernels) -> None:
        super().__init__(inputs, (outputs,), Unquantized(kernels))
        self.weight = in_float32(outputs, inputs)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return super().forward(x.float(), dtype)
