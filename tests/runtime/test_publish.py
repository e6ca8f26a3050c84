"""Log-probabilities of a prompt: a few rows at a time, and the same as all at once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mtpserve.core.batch import Hidden
from mtpserve.core.plan import NewRequest, SpanPlan
from mtpserve.core.protocols.models import Trunk
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.runtime.publish import SCORED, prompt_logprobs
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.spec.verify.logprobs import ranked

VOCAB, HIDDEN = 50, 8


class Head:
    """Small whole numbers: products are exact, however many rows share one."""

    def __init__(self) -> None:
        self.weight = torch.randint(-3, 4, (VOCAB, HIDDEN), generator=torch.Generator().manual_seed(0)).float()
        self.rows: list[int] = []

    def logits(self, head: Tensor) -> Tensor:
        self.rows.append(len(head))
        return head @ self.weight.T


def span(start: int, length: int, prompt: int, **options: Any) -> tuple[SpanPlan, RunnerRequest]:
    tokens = torch.randint(VOCAB, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
    new_request = NewRequest(0, Request("", tokens, SamplingParams(max_tokens=4, **options), seed=0), [], 0, prompt + 4)
    return SpanPlan(0, start, length, 0, start + length == prompt, False), RunnerRequest(new_request)


@pytest.mark.parametrize("length", [1, 5, SCORED, SCORED + 1, 3 * SCORED + 7])
@pytest.mark.parametrize("top", [0, 3])
def test_slices_are_the_whole(length: int, top: int) -> None:
    given = [span(0, 9, 20), span(4, length, length + 30, prompt_logprobs=top), span(6, 5, 11, prompt_logprobs=top)]
    spans, requests = [plan for plan, _ in given], [request for _, request in given]
    rows = sum(each.num_rows for each in spans)
    head = torch.randint(-3, 4, (rows, HIDDEN), generator=torch.Generator().manual_seed(1)).float()
    model = Head()
    found = prompt_logprobs(spans, requests, Hidden(head, head), cast(Trunk, model))
    assert set(found) == {1, 2} and max(model.rows) <= SCORED
    # The last row of the whole prompt has no token of the prompt after it.
    for r, first, count in ((1, 9, length), (2, 9 + length, 4)):
        start = spans[r].start
        after = torch.tensor([requests[r].tokens[start + 1 : start + count + 1]])
        wanted = ranked((head[first : first + count] @ model.weight.T).log_softmax(-1).unsqueeze(0), after, top)
        for name in ("token_logprobs", "ranks", "top_ids", "top"):
            assert torch.equal(getattr(found[r], name), getattr(wanted, name)), name
