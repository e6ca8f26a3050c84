from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mtpserve.core.errors import LoadError
from mtpserve.quant.fp8 import dequantize_block, quantize_block
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.loader import load
from mtpserve.weights.rules import Drop, Rule, Stack
from tests.weights.toys import write

ROWS, COLUMNS = (130, 200), 150
RULES = [Rule(r"gate\.weight", "weight", Stack(0)), Rule(r"up\.weight", "weight", Stack(1)), Rule(r"old\..*", None, Drop("not wanted"))]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = ROWS
        self.weight = nn.Parameter(torch.empty(sum(ROWS), COLUMNS, dtype=torch.bfloat16))


def tensors() -> dict[str, Tensor]:
    """Gate in fp8, up as it is: whether a matrix is quantised is decided one by one."""
    torch.manual_seed(0)
    weight, scale = quantize_block(torch.randn(ROWS[0], COLUMNS))
    return {"gate.weight": weight, "gate.weight_scale_inv": scale, "up.weight": torch.randn(ROWS[1], COLUMNS).bfloat16()}


def load_fused(*shards: dict[str, Tensor], directory: Path) -> Fused:
    module = Fused()
    load(module, Checkpoint.open(write(directory, *shards)), RULES, dtype=torch.bfloat16, device="cpu")
    return module


def refused(source: dict[str, Tensor], directory: Path, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        load_fused(source, directory=directory)


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "scales in another file"])
def test_a_matrix_with_scales_is_dequantised(tmp_path: Path, apart: bool) -> None:
    source = tensors()
    scales = {name: source[name] for name in source if name.endswith("_scale_inv")}
    weights = {name: source[name] for name in source if name not in scales}
    found = load_fused(*([weights, scales] if apart else [source]), directory=tmp_path).weight
    gate = dequantize_block(source["gate.weight"], source["gate.weight_scale_inv"]).bfloat16()
    assert torch.equal(found, torch.cat([gate, source["up.weight"]]))


def test_a_dropped_matrix_takes_its_scales_along(tmp_path: Path) -> None:
    source = tensors()
    load_fused(source | {"old.w": source["gate.weight"].clone(), "old.w_scale_inv": torch.ones(7)}, directory=tmp_path)


def test_fp8_without_scales(tmp_path: Path) -> None:
    source = tensors()
    del source["gate.weight_scale_inv"]
    refused(source, tmp_path, r"gate\.weight is stored as F8_E4M3, but its scales gate\.weight_scale_inv or gate\.weight_scale are not")


def test_scales_without_a_matrix(tmp_path: Path) -> None:
    source = tensors() | {"down.weight_scale_inv": torch.ones(1, 1)}
    refused(source, tmp_path, r"down\.weight_scale_inv is the scale of down\.weight, which")


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2,), (3, 2)])
def test_scales_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = tensors() | {"gate.weight_scale_inv": torch.ones(shape)}
    refused(source, tmp_path, r"gate\.weight_scale_inv has shape .*, it needs \[2, 2\] \(blocks of 128 x 128\)")


def test_scales_beside_a_matrix_that_is_not_fp8(tmp_path: Path) -> None:
    refused(
        tensors() | {"up.weight_scale_inv": torch.ones(2, 2)},
        tmp_path,
        r"up\.weight has shape .* and dtype BF16, it needs \[200, 150\] in F8_E4M3, I8",
    )


def test_a_scale_that_is_not_a_number(tmp_path: Path) -> None:
    source = tensors()
    source["gate.weight_scale_inv"][1, 1] = torch.nan
    refused(source, tmp_path, r"gate\.weight holds NaN")
