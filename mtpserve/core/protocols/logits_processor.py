"""A class of the operator's own that changes logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class LogitsProcessor(Protocol):
    """A class of the operator's own, named at launch. Called for every row whose logits decide something."""

    def __call__(
        self, tokens: list[int], prompt_len: int, params: Mapping[str, object], logits: Tensor
    ) -> Tensor:
        """`tokens` are prompt, output and the proposed tokens that lead here; `params` the request's
        custom_params; logits [vocabulary] float32 → the same. An exception ends the request, not the
        engine."""
        ...
