"""The storage formats of a linear layer's weights, by name."""

from collections.abc import Callable

from mtpserve.core.protocols.linear import LinearKernels, LinearMethod
from mtpserve.core.registry import Registry

METHODS: Registry[Callable[[LinearKernels], LinearMethod]] = Registry(
    "quantisation",
    {
        "none": "mtpserve.quant.unquantized:Unquantized",
        "stored": "mtpserve.quant.kept:Kept",
        "int8": "mtpserve.quant.int8:Int8",
    },
)
