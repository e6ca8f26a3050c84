"""What a request asks of sampling and of stopping. Validated here once, for the HTTP server and the offline engine alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtpserve.core.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Transforms apply in the order temperature, top_k, top_p, min_p; each works on what the one before it left.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. `max_tokens` None means: up to the context length.
    `seed` None draws one at admission; with a seed the same request gives the same text whatever else runs in the batch.
    Raises InvalidRequest, naming the field and the value.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def require(good: bool, field: str, allowed: str) -> None:
            if not good:
                raise InvalidRequest(f"{field} must be {allowed}, got {getattr(self, field)!r}", param=field)

        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        require(math.isfinite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "in [0, 100]")
        require(self.top_k >= -1, "top_k", "-1 or 0 (off) or positive")
        require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit signed integer")
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        require(all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop), "stop", f"strings of 1 to {MAX_STOP_LENGTH} characters")
        require(len(self.stop_token_ids) <= MAX_STOP_IDS, "stop_token_ids", f"at most {MAX_STOP_IDS} ids")

    @property
    def greedy(self) -> bool:
        # Below this the softmax is a point mass in float32, and dividing by it overflows.
        return self.temperature < 1e-5
