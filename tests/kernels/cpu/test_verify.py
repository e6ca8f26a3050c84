"""The engine's two decisions by the kernels of a CPU, beside plain torch's: the verdict over drafts, and the next drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.accept import draw
from torch import Tensor

from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.sampling.sampling import BatchSampler, SamplingFeatures, SamplingState
from mtpserve.spec import cpu
from mtpserve.spec.draft.propose import propose
from mtpserve.spec.verify.accept import verify
from mtpserve.spec.verify.thresholds import Thresholds
from tests.spec.test_accept import batch_of

SEATS, CPU = 12, torch.device("cpu")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_decision(temperature: float) -> None:
    """Chains drawn from q, and greedy ones."""
    requests, k, vocab = 300, 3, 200
    dice = torch.Generator().manual_seed(5)
    logits = torch.randn(requests, k + 1, vocab, generator=dice) * 2
    q = (logits[:, :-1] + torch.randn(requests, k, vocab, generator=dice) * 0.5).softmax(-1)
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=dice).view(requests, k) if temperature else logits[:, :-1].argmax(-1)
    drafts[::5, 1] = 7
    batch = batch_of(drafts, vocab, temperature, q, torch.randint(k + 1, (requests,), generator=dice))
    batch.sampler.parameters.top_p.fill_(1.0)  # as an admission writes it
    ours, plain = cpu.verify(logits, batch, k, Thresholds()), verify(logits, batch, k, Thresholds())
    assert ours.path is None and not ours.failed.any()
    assert torch.equal(ours.num_accepted_tokens, plain.num_accepted_tokens) and set(plain.num_accepted_tokens.tolist()) == {0, 1, 2, 3}
    counts = torch.arange(k + 1) <= plain.num_accepted_tokens.unsqueeze(1)
    assert torch.equal(ours.tokens[counts], plain.tokens[counts])


def sampler_of(vocab: int, dice: torch.Generator, **asked: Any) -> BatchSampler:
    """Every seat with parameters of its own."""
    sizes = SpecSizes(steps=2, num_proposed=2, written=2)
    state = SamplingState(SEATS - 1, LogitRules(DeviceRequests(SEATS, 9, sizes, vocab, 16, CPU), SEATS, vocab, (), (), CPU), CPU)
    for tensor, options in (
        (state.temperature, [0.0, 0.5, 1.0, 1.5]), (state.top_p, [1.0, 0.9, 0.3]), (state.min_p, [0.0, 0.1]), (state.top_k, [0, 5, 40]),
        (state.coupled, [0, 1]),
    ):  # fmt: skip
        tensor.copy_(torch.tensor(options)[torch.randint(len(options), (SEATS,), generator=dice)])
    state.seed.copy_(torch.randint(-(1 << 62), 1 << 62, (SEATS,), generator=dice))
    return BatchSampler(state, SamplingFeatures(any_greedy=True, largest_k=40, any_top_p=True, any_min_p=True, **asked))


@pytest.mark.parametrize("asked", [{}, {"any_coupled": True}, {"any_coupled": True, "all_coupled": True}], ids=str)
@pytest.mark.parametrize("vocab", [50, 3001])
def test_the_same_drafts(vocab: int, asked: dict[str, Any]) -> None:
    for seed in range(6):
        dice = torch.Generator().manual_seed(seed)
        sampler = sampler_of(vocab, dice, **asked)
        if not asked:
            sampler.state.coupled.zero_()
        req_indices, index = torch.randperm(SEATS, generator=dice), torch.randint(500, (SEATS,), generator=dice)
        logits = torch.randn(SEATS, vocab, generator=dice) * 2
        logits[0, ::3] = -torch.inf  # forbidden
        # In the chain's table the rows of one draft are not side by side.
        q, own_q = (None, None) if "all_coupled" in asked else torch.full((2, SEATS, 3, vocab), torch.nan)[:, :, 1]
        ours, tokens = cpu.propose(logits, req_indices, index, sampler, own_q), propose(logits, req_indices, index, sampler, q)
        assert torch.equal(ours, tokens)
        if q is not None and own_q is not None:
            assert torch.equal(own_q > 0, q > 0)
            torch.testing.assert_close(own_q, q, rtol=1e-5, atol=0)


def test_greedy_drafts_are_the_largest() -> None:
    dice = torch.Generator().manual_seed(1)
    logits, sampler = torch.randn(5, 700, generator=dice), sampler_of(700, dice, all_greedy=True)
    logits[1, 30:] = torch.nan
    logits[2] = -torch.inf
    tokens = cpu.propose(logits, torch.arange(5), torch.arange(5), sampler, None)
    assert torch.equal(tokens, propose(logits, torch.arange(5), torch.arange(5), sampler, None))


@pytest.mark.parametrize("vocab", [40, 3001])
def test_whatever_is_not_finite_a_draft_comes_from_a_distribution(vocab: int) -> None:
    dice = torch.Generator().manual_seed(2)
    logits, sampler = torch.randn(SEATS, vocab, generator=dice), sampler_of(vocab, dice)
    logits[0, 3], logits[1], logits[2], logits[3, 5], logits[4, 1:] = torch.nan, -torch.inf, torch.nan, torch.inf, -torch.inf
    logits[5, : vocab // 2] = -torch.inf
    logits[5, vocab // 2] = torch.nan
    each = torch.arange(SEATS)
    q, plain = torch.empty(2, SEATS, vocab)
    tokens = cpu.propose(logits, each, each, sampler, q)
    propose(logits, each, each, sampler, plain)
    torch.testing.assert_close(q, plain, rtol=1e-5, atol=0)
    assert (q.gather(1, tokens.unsqueeze(1)) > 0).all()


def test_a_row_is_drawn_as_if_alone(with_threads: Callable[[int, Callable[[], Any]], Any]) -> None:
    dice = torch.Generator().manual_seed(3)
    vocab = 20001
    cuts, logits = sampler_of(vocab, dice).parameters, torch.randn(SEATS, vocab, generator=dice)
    req_indices, index = torch.randperm(SEATS, generator=dice), torch.randint(500, (SEATS,), generator=dice)

    def drawn(rows: slice) -> tuple[Tensor, Tensor]:
        q = torch.empty_like(logits[rows])
        given = logits[rows], req_indices[rows], index[rows]
        return draw(*given, cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.seed, cuts.coupled, q), q

    one, two = (with_threads(threads, lambda: drawn(slice(None))) for threads in (1, 2))
    alone = [drawn(slice(i, i + 1)) for i in range(SEATS)]
    for i, part in enumerate(one):
        assert torch.equal(part, two[i]) and torch.equal(part, torch.cat([row[i] for row in alone]))
