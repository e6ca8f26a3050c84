"""The attention backends by name."""

from collections.abc import Callable

from mtpserve.cache.stores import Stores
from mtpserve.core.protocols.attention import AttentionBackend
from mtpserve.core.registry import Registry

# Made of the stores, the number of query heads, and the scale of the scores.
BACKENDS: Registry[Callable[[Stores, int, float], AttentionBackend]] = Registry(
    "attention backend",
    {
        "reference": "mtpserve.attention.reference:ReferenceAttention",
        "exact": "mtpserve.attention.exact:ExactAttention",
        "cpu": "mtpserve.attention.cpu:CPUAttention",
        "triton": "mtpserve.attention.gpu.triton:TritonAttention",
    },
)
