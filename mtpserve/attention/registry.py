"""The attention backends by name."""

from mtpserve.core.registry import Registry

BACKENDS = Registry(
    "attention backend",
    {
        "reference": "mtpserve.attention.reference:ReferenceAttention",
        "exact": "mtpserve.attention.exact:ExactAttention",
        "triton": "mtpserve.attention.triton:TritonAttention",
    },
)
