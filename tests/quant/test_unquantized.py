"""Products of a head in float32: rounded and widened on a CPU, one operation without rounding on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mtpserve.layers.devices.onednn import packs
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.layers.linear import Linear
from mtpserve.quant.unquantized import Unquantized


class OperatorNames(TorchDispatchMode):
    """Writes down what is dispatched while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def linear_of(device: str, dtype: torch.dtype, bias: bool = False) -> tuple[Linear, Tensor]:
    """A layer from 48 to 33 numbers, and 5 rows for it."""
    layer = Linear(48, (33,), Unquantized(torch_kernels()), bias)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(torch.randn(parameter.shape, device=device, dtype=dtype), requires_grad=False))
    return layer, torch.randn(5, 48, device=device, dtype=dtype)


def operators(device: str, dtype: torch.dtype, bias: bool = False) -> tuple[list[str], torch.dtype]:
    """Of a product in float32, and the type of its result; nothing is computed."""
    with FakeTensorMode():
        layer, x = linear_of(device, dtype, bias)
        with torch.no_grad(), OperatorNames() as operator_names:
            out = layer(x, torch.float32)
    assert out.shape == (5, 33)
    return operator_names.names, out.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_gpu_multiplies_to_float32_at_once(dtype: torch.dtype) -> None:
    names, out_dtype = operators("cuda", dtype)
    assert out_dtype == torch.float32
    assert "aten::mm.dtype" in names and "aten::_to_copy" not in names, names


@pytest.mark.parametrize(("device", "bias"), [("cpu", False), ("cuda", True)], ids=["cpu", "bias"])
def test_other_products_are_widened(device: str, bias: bool) -> None:
    names, out_dtype = operators(device, torch.bfloat16, bias)
    assert out_dtype == torch.float32
    assert "aten::_to_copy" in names and "aten::mm.dtype" not in names, names


def test_on_a_cpu_the_numbers_are_those_of_the_layers_type() -> None:
    layer, x = linear_of("cpu", torch.bfloat16)
    assert layer(x, torch.float32).equal(layer(x).float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_on_a_gpu_the_sums_are_not_rounded(dtype: torch.dtype) -> None:
    layer, x = linear_of("cuda", dtype)
    exact = x.double() @ layer.weight.double().T
    torch.testing.assert_close(layer(x, torch.float32).double(), exact, rtol=1e-5, atol=1e-4)


def test_onednn_packs_bfloat16_where_it_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it raises for the layout."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    for supported in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        assert [packs(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [True, supported, False]
