"""The acceptance rule alone, against the distributions that it must reproduce, in tens of thousands of rounds at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from mtpserve.core.batch import Batch, VerifyOutput
from mtpserve.core.plan import NewRequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.sampling.sampling import BatchSampler, SamplingFeatures, SamplingState
from mtpserve.spec.verify import accept as module
from mtpserve.spec.verify.streams import DRAFT, DRAW

ROUNDS, VOCAB, LENGTH = 32_000, 32, 11
CPU = torch.device("cpu")


def batch_of(drafts: Tensor, vocab: int, temperature: float, q: Tensor | None = None, count: Tensor | None = None) -> Batch:
    """drafts [R, K] of R requests with one committed token in the batch each; q [K, vocabulary] for all, or [R, K, vocabulary]."""
    rounds, k = drafts.shape
    req_tensors = DeviceRequests(rounds, LENGTH + 1, SpecSizes(steps=k, num_proposed=k, written=k), vocab, 16, CPU)
    req_tensors.num_tokens.fill_(LENGTH)
    if q is not None and k:
        req_tensors.draft_probs[:rounds] = q
    sampling = SamplingState(rounds, LogitRules(req_tensors, rounds, vocab, (), (), CPU), CPU)
    sampling.temperature.fill_(temperature)
    request = RunnerRequest(NewRequest(0, Request("", [0], SamplingParams(temperature=temperature), seed=0), [], 0, 99))
    sampling.seed[:rounds] = torch.arange(rounds) * 7919 - 10_000
    rows = torch.arange(rounds * (k + 1)).view(rounds, k + 1)
    each = torch.arange(rounds)
    return Batch(
        input_ids=torch.cat([torch.zeros(rounds, 1, dtype=torch.int64), drafts], 1).flatten(),
        positions=rows.flatten(),
        token_indices=rows.flatten(),
        slot_mapping=rows.flatten(),
        token_req_indices=each.repeat_interleave(k + 1),
        req_indices=each,
        query_start_loc=torch.arange(rounds + 1) * (k + 1),
        seq_lens=torch.full((rounds,), LENGTH + k),
        num_draft_tokens=torch.full((rounds,), k) if count is None else count,
        last_token_rows=rows[:, 0],
        sample_rows=rows,
        samples=torch.ones(rounds, dtype=torch.int64),
        draft_spans=None,
        req_tensors=req_tensors,
        sampler=BatchSampler(sampling, SamplingFeatures.of([request], coupled=False)),
    )


def accept(logits: Tensor, batch: Batch) -> VerifyOutput:
    return module.accept(logits, batch, depth=logits.shape[1] - 1)


def distribution(positions: int, seed: int, sharp: float = 1.5) -> Tensor:
    """[positions, vocabulary] float32"""
    generator = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(positions, VOCAB, generator=generator)).softmax(-1)


def without(p: Tensor, tokens: slice) -> Tensor:
    p = p.clone()
    p[:, tokens] = 0
    return p / p.sum(-1, keepdim=True)


def rounds_of(p: Tensor, q: Tensor, claimed: Tensor | None = None) -> tuple[VerifyOutput, Tensor]:
    """p [k+1, V], q [k, V]: drafts are drawn from q with the engine's own numbers and said to come from `claimed` → verdict, drafts."""
    k = len(q)
    sampler = batch_of(torch.zeros(ROUNDS, k, dtype=torch.int64), VOCAB, 1.0).sampler
    index = LENGTH + torch.arange(k).expand(ROUNDS, k)
    each = torch.arange(ROUNDS)
    drafts = torch.stack([sampler.choose(q[i].expand(ROUNDS, VOCAB), each, index[:, i], DRAFT) for i in range(k)], 1)
    batch = batch_of(drafts, VOCAB, 1.0, q if claimed is None else claimed)
    return accept(p.log().expand(ROUNDS, k + 1, VOCAB), batch), drafts


def chi_square(tokens: Tensor, p: Tensor) -> float:
    """The probability of counts as odd as these; tokens that p rules out must not occur at all. Rare ones are taken together."""
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    wanted = p.double().numpy() / p.double().sum().item() * len(tokens)
    assert counts[wanted == 0].sum() == 0
    rare = wanted < 5
    if rare.any():
        counts, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(wanted[~rare], wanted[rare].sum())
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    return 1.0 if len(counts) < 2 else float(stats.chisquare(counts, wanted).pvalue)


def check(p: Tensor, q: Tensor) -> None:
    verify_output, drafts = rounds_of(p, q)
    assert not verify_output.failed.any() and verify_output.num_accepted_tokens.max() <= len(q)
    reached = ROUNDS
    for i in range(len(q) + 1):
        there = verify_output.num_accepted_tokens >= i
        # Given that everything before it was kept, the token at i has the law p[i], kept or replaced.
        assert chi_square(verify_output.tokens[there, i], p[i]) > 1e-4, f"position {i}"
        if i < len(q):
            kept = int((verify_output.num_accepted_tokens > i).sum())
            rate = torch.minimum(p[i], q[i]).sum().item()
            assert abs(kept - rate * reached) <= 5 * (reached * max(rate * (1 - rate), 1e-9)) ** 0.5 + 1e-3 * reached**0.5, f"position {i}"
            assert (verify_output.tokens[:, i] == drafts[:, i])[verify_output.num_accepted_tokens > i].all()
            reached = kept


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_what_is_committed_has_the_models_distribution(k: int) -> None:
    check(distribution(k + 1, seed=k), 0.6 * distribution(k, seed=k) + 0.4 * distribution(k, seed=k + 50))


@pytest.mark.parametrize("k", [1, 3])
def test_zeros_where_the_other_has_mass(k: int) -> None:
    p, q = distribution(k + 1, seed=3, sharp=0.7), distribution(k, seed=4, sharp=0.7)
    check(without(p, slice(0, 12)), q)
    check(p, without(q, slice(20, 32)))
    check(without(p, slice(0, 8)), without(q, slice(24, 32)))


def test_proposals_that_are_all_wrong() -> None:
    check(without(distribution(3, seed=5), slice(0, 16)), without(distribution(2, seed=6), slice(16, 32)))


def test_proposals_from_the_very_distribution_are_all_kept() -> None:
    p = distribution(4, seed=7)
    verify_output, _ = rounds_of(p, p[:3].clone())
    assert (verify_output.num_accepted_tokens == 3).float().mean() > 0.999  # but for rounding
    check(p, p[:3])


@pytest.mark.parametrize("token", [0, 9, 31])
def test_a_point_mass_as_proposal(token: int) -> None:
    q = torch.zeros(2, VOCAB)
    q[:, token] = 1
    check(distribution(3, seed=8), q)


def test_a_point_mass_as_target() -> None:
    p = torch.zeros(3, VOCAB)
    p[:, 5] = 1
    check(p, distribution(2, seed=9))


def test_the_test_would_see_a_tenth_of_leniency() -> None:
    p, q = distribution(2, seed=1), distribution(1, seed=2)
    verify_output, _ = rounds_of(p, q, claimed=0.9 * q)
    assert chi_square(verify_output.tokens[:, 0], p[0]) < 1e-5


def test_plain_sampling_is_a_chain_of_none() -> None:
    p = distribution(1, seed=3)
    verify_output = accept(p.log().expand(ROUNDS, 1, VOCAB), batch_of(torch.zeros(ROUNDS, 0, dtype=torch.int64), VOCAB, 1.0))
    assert verify_output.tokens.shape == (ROUNDS, 1) and not verify_output.num_accepted_tokens.any()
    assert chi_square(verify_output.tokens[:, 0], p[0]) > 1e-4


def test_shorter_chains_beside_longer_ones() -> None:
    """Padding rows must neither be kept nor change the law of the token that ends a short chain."""
    p, q = distribution(4, seed=4), 0.7 * distribution(3, seed=4) + 0.3 / VOCAB
    verdict_of_all, drafts = rounds_of(p, q)
    count = torch.arange(ROUNDS) % 4
    logits = p.log().expand(ROUNDS, 4, VOCAB).clone()
    padded = torch.arange(4) > count[:, None]
    logits[padded] = torch.nan
    verify_output = accept(logits, batch_of(drafts, VOCAB, 1.0, q, count))
    assert not verify_output.failed.any() and torch.equal(
        verify_output.num_accepted_tokens, torch.minimum(verdict_of_all.num_accepted_tokens, count)
    )
    for k in range(4):
        ended = (count == k) & (verify_output.num_accepted_tokens == k)
        assert chi_square(verify_output.tokens[ended, k], p[k]) > 1e-4


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("mixed", [False, True])
def test_greedy_compares_with_the_most_likely(k: int, mixed: bool) -> None:
    """In a batch of greedy requests alone, and where one that samples makes it go through the distributions."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(300, k + 1, 5, generator=generator)
    drafts = torch.randint(5, (300, k), generator=generator)
    agree = torch.rand(300, k, generator=generator) < 0.7
    drafts = torch.where(agree, logits[:, :k].argmax(-1), drafts)
    batch = batch_of(drafts, 5, 0.0, torch.nn.functional.one_hot(drafts, 5).float())
    if mixed:
        sampler = batch.sampler
        assert isinstance(sampler, BatchSampler)
        sampler.state.temperature[0] = 1.0
        sampler.features = replace(sampler.features, all_greedy=False)
    verify_output = accept(logits, batch)
    for row in range(1 if mixed else 0, 300):
        wanted = logits[row].argmax(-1).tolist()
        same = 0
        while same < k and drafts[row, same] == wanted[same]:
            same += 1
        assert int(verify_output.num_accepted_tokens[row]) == same
        assert verify_output.tokens[row, : same + 1].tolist() == wanted[: same + 1]


BROKEN = {
    "all NaN": lambda row: row.fill_(torch.nan),
    "one NaN": lambda row: row[7:8].fill_(torch.nan),
    "the last NaN": lambda row: row[-1:].fill_(torch.nan),
    "all -inf": lambda row: row.fill_(-torch.inf),
    "one +inf": lambda row: row[3:4].fill_(torch.inf),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [100, 8193, 10_000])
@pytest.mark.parametrize("how", BROKEN.values(), ids=BROKEN.keys())
def test_broken_rows_fail_alone_and_stay_in_the_vocabulary(how: object, vocab: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 3, vocab, generator=generator)
    logits[:, :, 5] = -torch.inf  # one token that is ruled out is no fault
    drafts = torch.randint(6, vocab, (9, 2), generator=generator)
    q = torch.nn.functional.one_hot(drafts, vocab).float()
    good = accept(logits, batch_of(drafts, vocab, temperature, q))
    assert not good.failed.any()
    bad = logits.clone()
    for row in (1, 4, 8):
        assert callable(how)
        how(bad[row, 0])
    verify_output = accept(bad, batch_of(drafts, vocab, temperature, q))
    assert verify_output.failed.nonzero().flatten().tolist() == [1, 4, 8]
    assert (
        verify_output.tokens.min() >= 0
        and verify_output.tokens.max() < vocab
        and verify_output.num_accepted_tokens.min() >= 0
        and verify_output.num_accepted_tokens.max() <= 2
    )
    others = ~verify_output.failed
    assert torch.equal(verify_output.tokens[others], good.tokens[others]) and torch.equal(
        verify_output.num_accepted_tokens[others], good.num_accepted_tokens[others]
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [100, 8193, 10_000, 151_936])
def test_mass_in_the_first_tokens_alone(vocab: int, temperature: float) -> None:
    """Whatever block of a vocabulary comes last: nothing is chosen out of it, or behind it."""
    logits = torch.full((4, 3, vocab), -torch.inf)
    logits[:, :, :3] = torch.tensor([0.0, 1.0, 2.0])
    drafts = torch.tensor([[0, 1], [2, 2], [7, 1], [vocab - 1, 0]])
    verify_output = accept(logits, batch_of(drafts, vocab, temperature, torch.nn.functional.one_hot(drafts, vocab).float()))
    assert not verify_output.failed.any() and (verify_output.num_accepted_tokens[2:] == 0).all()
    for row, accepted in enumerate(verify_output.num_accepted_tokens.tolist()):
        assert set(verify_output.tokens[row, : accepted + 1].tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_decided_nothing_may_be_anything(temperature: float) -> None:
    """The row behind a rejected draft saw that draft: whatever it says is thrown away."""
    logits = torch.zeros(4, 3, 100)
    logits[:, :, 50] = 200.0
    drafts = torch.tensor([[50, 50], [50, 3], [3, 50], [3, 3]])
    logits[2:, 1:] = torch.nan
    logits[1, 2] = torch.nan
    q = torch.nn.functional.one_hot(drafts, 100).float()
    verify_output = accept(logits, batch_of(drafts, 100, temperature, q))
    assert verify_output.num_accepted_tokens.tolist() == [2, 1, 0, 0] and not verify_output.failed.any()
    assert all(verify_output.tokens[row, at] == 50 for row, at in enumerate(verify_output.num_accepted_tokens.tolist()))


@pytest.mark.parametrize("vocab", [1, 2, 100, 8193, 40_000])
def test_a_choice_is_in_the_vocabulary_and_possible(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(64, vocab, generator=generator) ** 8 * 10.0 ** torch.randint(-30, 30, (64, 1), generator=generator)
    weights[torch.rand(64, vocab, generator=generator) < 0.7] = 0
    weights[:16, : vocab // 2] = 0
    weights[16:32, -(vocab // 2) :] = 0
    sampler = batch_of(torch.zeros(64, 0, dtype=torch.int64), vocab, 1.0).sampler
    found = sampler.choose(weights, torch.arange(64), torch.arange(64), DRAFT)
    assert found.min() >= 0 and found.max() < vocab
    possible = weights.sum(-1) > 0
    assert (weights.gather(1, found[:, None]).squeeze(1) > 0)[possible].all()


def test_a_choice_follows_the_weights() -> None:
    p = distribution(1, seed=12)
    sampler = batch_of(torch.zeros(ROUNDS, 0, dtype=torch.int64), VOCAB, 1.0).sampler
    for index, scale in ((3, 1.0), (4, 1e-20), (5, 1e20)):
        found = sampler.choose(p.expand(ROUNDS, VOCAB) * scale, torch.arange(ROUNDS), torch.full((ROUNDS,), index), DRAFT)
        assert chi_square(found, p[0]) > 1e-4
    broken = sampler.choose(torch.full((ROUNDS, VOCAB), torch.nan), torch.arange(ROUNDS), torch.arange(ROUNDS), DRAFT)
    assert broken.min() >= 0 and broken.max() < VOCAB


def test_what_pads_fewer_drafts_is_not_accepted() -> None:
    """Greedy requests, whose padding is just what the target chooses."""
    logits = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(5))
    count = torch.arange(8) % 4
    verify_output = accept(logits, batch_of(logits[:, :3].argmax(-1), 5, 0.0, count=count))
    assert torch.equal(verify_output.num_accepted_tokens, count)


def test_a_coupled_draft_is_accepted_where_the_target_draws_it() -> None:
    """Drafts that were drawn with the noise of their own places, each another one."""
    p, rounds = distribution(4, seed=6), 300
    sampler, each = batch_of(torch.zeros(rounds, 3, dtype=torch.int64), VOCAB, 1.0).sampler, torch.arange(rounds)
    drafts = torch.stack([sampler.choose(p[i].expand(rounds, VOCAB), each, torch.full_like(each, LENGTH + i), DRAW) for i in range(3)], 1)
    batch = batch_of(drafts, VOCAB, 1.0)
    assert isinstance(batch.sampler, BatchSampler)
    batch.sampler.features = replace(batch.sampler.features, all_coupled=True)
    assert (accept(p.log().expand(rounds, 4, VOCAB), batch).num_accepted_tokens == 3).all()
