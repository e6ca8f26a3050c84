"""What becomes an MTP layer's input: a hidden state and the next token's embedding, in the order of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.engine.startup.planning import describe
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.layers.fusion import Fusion
from mtpserve.quant.unquantized import Unquantized
from tests.models.published_configs import DEEPSEEK_V3, ERNIE_21B_A3B, GLM45_AIR, MIMO_7B, MIMO_V2_FLASH


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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MIMO_7B, ("hidden-embedding", "pre", "pre")),
        (DEEPSEEK_V3, ("embedding-hidden", "post", "post")),
        (GLM45_AIR, ("embedding-hidden", "post", "post")),
        (ERNIE_21B_A3B, ("embedding-hidden", "pre", "pre")),
        (MIMO_V2_FLASH, ("embedding-hidden", "post", None)),
    ],
    ids=["mimo", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "mimo_v2_flash"],
)
def test_what_each_familys_layer_gets(tmp_path: Path, config: dict[str, Any], expected: tuple[str, ...]) -> None:
    """The order of the halves, the trunk's hidden state before or after its final norm, and what the layer hands on to itself, as the
    published code has it. What is wrong here costs drafts and changes no text."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    mtp = describe(EngineConfig(model=ModelConfig(model=str(tmp_path), load_format="dummy")), want_mtp=True).arch.mtp
    assert mtp is not None and (mtp.fusion, mtp.hidden_in, mtp.recycle) == expected
