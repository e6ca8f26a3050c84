"""What becomes an MTP layer's input: a hidden state and the next token's embedding, in the order of each family."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from mtpserve.layers.fusion import Fusion
from mtpserve.layers.torch_kernels import torch_kernels
from mtpserve.quant.unquantized import Unquantized


@pytest.mark.parametrize(("order", "expected"), [("embedding-hidden", 1 - 2), ("hidden-embedding", -1 + 2)])
def test_the_order_is_that_of_the_family(order: Literal["embedding-hidden", "hidden-embedding"], expected: int) -> None:
    """The projection adds the first half and twice the second one."""
    kernels, one = torch_kernels(), torch.eye(4)
    fusion = Fusion(4, 1e-6, order, Unquantized(kernels), kernels)
    for norm in (fusion.embedding_norm, fusion.hidden_norm):
        norm.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    fusion.project.weight = nn.Parameter(torch.cat([one, 2 * one], 1), requires_grad=False)
    found = fusion(torch.full((1, 4), 3.0), torch.full((1, 4), -3.0))
    torch.testing.assert_close(found, torch.full((1, 4), float(expected)))
