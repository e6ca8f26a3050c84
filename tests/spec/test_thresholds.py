"""The lossy thresholds: what they do to a node's law, and that they leave greedy requests alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mtpserve.core.batch import Batch
from mtpserve.core.sampling import SamplingParams
from mtpserve.spec.verify.accept import accept
from mtpserve.spec.verify.thresholds import Thresholds, lenient
from tests.spec.test_accept import batch_of
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model


def batch(drafts: list[list[int]], count: list[int]) -> Batch:
    rows = torch.arange(len(drafts) * (len(drafts[0]) + 1)).view(len(drafts), -1)
    ids = torch.cat([torch.zeros(len(drafts), 1, dtype=torch.int64), torch.tensor(drafts)], 1).flatten()
    nothing: Any = None
    fields = dict.fromkeys(Batch._fields, nothing) | {"input_ids": ids, "sample_rows": rows, "num_draft_tokens": torch.tensor(count)}
    return Batch(**fields)


def test_drafts_get_more_than_their_share() -> None:
    p = torch.tensor([[[0.1, 0.3, 0.6], [0.2, 0.2, 0.6]]])
    found = lenient(p, batch([[1]], [1]), Thresholds(acc=0.5))
    assert torch.allclose(found[0, 0], torch.tensor([0.4 / 7, 0.6, 2.4 / 7])), "0.3 / 0.5, the rest in proportion"
    assert torch.equal(found[0, 1], p[0, 1]), "nothing continues the last node"
    assert torch.allclose(lenient(p, batch([[2]], [1]), Thresholds(acc=0.5))[0, 0], torch.tensor([0.0, 0.0, 1.0]))
    assert torch.allclose(lenient(p, batch([[1]], [1]), Thresholds(single=0.3))[0, 0], torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(lenient(p, batch([[1]], [1]), Thresholds(single=0.31)), p)
    assert torch.equal(lenient(p, batch([[1]], [0]), Thresholds(single=0.1, acc=0.1)), p), "void drafts are none"
    assert Thresholds().lossless and not Thresholds(single=0.9).lossless and not Thresholds(acc=0.9).lossless


@pytest.mark.parametrize("thresholds", [{"speculative_accept_threshold_single": 0.01}, {"speculative_accept_threshold_acc": 0.3}])
def test_more_is_accepted_and_greedy_text_stays(thresholds: dict[str, float]) -> None:
    model, asked = tiny_model(), prompts(8)
    sampled = [SamplingParams(max_tokens=40, temperature=0.9, seed=i) for i in range(8)]
    strict, loose = (tiny_engine(model, each) for each in (tree(3, 4, 12), replace(tree(3, 4, 12), **thresholds)))
    run(strict, asked, sampled)
    run(loose, asked, sampled)
    assert loose.stats.steps_total < strict.stats.steps_total
    greedy = SamplingParams(max_tokens=20, temperature=0)
    assert run(loose, asked, greedy) == run(tiny_engine(model, 0), asked, greedy)


def test_no_kernel_decides_where_thresholds_are_lossy() -> None:
    def kernel(*_: object) -> Any:
        raise AssertionError("it knows no thresholds")

    drafts, q = torch.zeros(2, 1, dtype=torch.int64), torch.full((1, 4), 0.25)
    assert len(accept(torch.zeros(2, 2, 4), batch_of(drafts, 4, 1.0, q), 1, Thresholds(acc=0.5), kernel=kernel).num_accepted_tokens) == 2
