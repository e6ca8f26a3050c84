"""In what two modules differ: every tensor that they hold, packed ones and those behind addresses among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtpserve.weights.parts import contents


def differences(one: Any, other: Any, name: str = "", done: set[tuple[int, int]] | None = None) -> list[str]:
    """Names of tensors that are not the same, to the last bit."""
    done = set() if done is None else done
    if one is other or (id(one), id(other)) in done:
        return []
    done.add((id(one), id(other)))
    if isinstance(one, Tensor):
        return [] if isinstance(other, Tensor) and same(one, other) else [name]
    here, there = contents(one), contents(other)
    return [found for key, value in here.items() if key != "kernels" for found in differences(value, there.get(key), f"{name}.{key}", done)]


def same(one: Tensor, other: Tensor) -> bool:
    one, other = (tensor.to_dense() if tensor.is_mkldnn else tensor for tensor in (one, other))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def changed(tensors: Mapping[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """Other numbers of the same size; of stored matrices the rows in another order."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            found[name] = (tensor * (1 + 0.5 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        elif tensor.dtype == torch.float8_e4m3fn or name.endswith("_blocks"):
            found[name] = tensor.flip(0).contiguous()
        else:
            found[name] = tensor
    return found
