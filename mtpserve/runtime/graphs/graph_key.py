"""What tells captured steps apart, and what one of them is fed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mtpserve.core.batch import Logprobs
from mtpserve.core.plan import SpanPlan
from mtpserve.runtime.inputs import RowLayout
from mtpserve.runtime.sampling.sampling import SamplingFeatures

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True)
class GraphKey:
    requests: int  # that decode
    width: int  # rows of each
    max_steps: int  # 0: nothing is proposed
    trees: bool
    features: SamplingFeatures
    # Where nothing is proposed: a later step stores the KV of the model that proposes. Beside prompts it does
    # so for some rows.
    defers_kv: bool = False
    rows: int = 0  # all prompts together
    spans: int = 0  # prompts' spans
    resumed: bool = False  # some of these start right after pages of another request

    def __str__(self) -> str:
        decoding = f"{self.requests} requests, {self.width} rows each" if self.requests else ""
        prompts = f"{self.rows} rows of prompts" if self.rows else ""
        return f"{' and '.join(filter(None, (decoding, prompts)))}, {self.max_steps} deep"


class GraphOutput(NamedTuple):
    """All that a graph keeps of a step. The memory of everything else is the next graph's, too."""

    table: Tensor  # for the host, see runtime/publish.RunnerOutput
    num_proposals: Tensor | None  # [requests], for the next step; None: nothing is proposed
    proposes_trees: bool  # these branch
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    key: GraphKey
    # [3 to 6, requests + spans]: req_idx, depth, the most proposals; the numbers of checkpoints where layers
    # keep states; the first mask where grammars bear on the step
    request_numbers: Tensor
    prompt_numbers: Tensor | None  # [3, spans], see `padded_prompts`
    layout: RowLayout | None  # for decoding requests; every replay reads its tensors
    max_proposals: int  # verified in one span
    has_trees: bool  # what is verified may branch
    output: GraphOutput  # its first dimension is requests + spans
    replay: Callable[[], object]


def tiers(max_batch_size: int) -> list[int]:
    """Numbers of requests, the largest last."""
    return [*(size for size in ROWS if size < max_batch_size), max_batch_size]


def padded(numbers: Seq[int], decoding: int, filler: int, key: GraphKey) -> list[int]:
    """One of each request, of which so many decode, up to what the graph of `key` has of both kinds."""
    prompts = [*numbers[decoding:], *[filler] * key.spans][: key.spans]
    return [*numbers[:decoding], *[filler] * (key.requests - decoding), *prompts]


def checkpoint_numbers(plans: Seq[SpanPlan]) -> list[list[int]]:
    """Two lists with a number for each span: tokens before the checkpoint, and the checkpoint's number."""
    checkpoints = [plan.checkpoint or (0, 0) for plan in plans]
    return [[tokens for tokens, _ in checkpoints], [number for _, number in checkpoints]]
