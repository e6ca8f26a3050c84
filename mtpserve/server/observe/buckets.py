"""Bounds of the histograms' buckets, in seconds or in tokens: ours, and the peers', from which boards made
for them compute quantiles."""

from __future__ import annotations

FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 300,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2,
    0.5, 1, 2, 5,
)  # fmt: skip
REQUEST_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 300, 600, 1200)
LENGTH_BUCKETS = tuple(4**power for power in range(10))  # tokens: 1 … 262144

SGLANG_FIRST = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
SGLANG_TOKEN = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6,
    0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
SGLANG_REQUEST = (*SGLANG_FIRST, 600, 1200, 1800, 2400)
SGLANG_QUEUE = (
    0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 80, 100,
    200, 400, 800, 1600,
)  # fmt: skip
VLLM_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
VLLM_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
VLLM_CHOICES = (1, 2, 5, 10, 20)
LENGTHS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
