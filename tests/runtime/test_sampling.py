"""The transforms against loops in numpy, and the random numbers: uniform, independent, and nobody else's business."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from mtpserve_kernels.noise import STREAMS
from scipy import stats
from torch import Tensor

from mtpserve.core.plan import NewRequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.runtime.admissions import seat
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.sampling.sampling import BatchSampler, SamplingFeatures, SamplingState
from tests import selection

CPU = torch.device("cpu")


class Seated:
    """Requests with these parameters, one in each seat."""

    def __init__(self, params: Seq[SamplingParams], seeds: Seq[int] | None = None) -> None:
        req_tensors = DeviceRequests(len(params), 10, SpecSizes(), 2, 16, CPU)
        self.sampling = SamplingState(len(params), LogitRules(req_tensors, len(params), 2, (), (), CPU), CPU)
        each = enumerate(zip(params, range(len(params)) if seeds is None else seeds, strict=True))
        self.records = [RunnerRequest(NewRequest(i, Request(str(i), [0], asked, seed=seed), [], 0, 10)) for i, (asked, seed) in each]
        seat(self.records, [], req_tensors, self.sampling)

    def for_batch(self, seats: Iterable[int]) -> BatchSampler:
        return BatchSampler(self.sampling, SamplingFeatures.of([self.records[req_idx] for req_idx in seats], False))


seated = Seated


def oracle(logits: Tensor, params: SamplingParams) -> npt.NDArray[np.float64]:
    """One row, one rule after the other, in float64."""
    x = logits.double().numpy()
    if params.greedy:
        return np.asarray(np.eye(len(x))[int(x.argmax())])
    p = np.exp((x - x.max()) / params.temperature)
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if params.top_k > 0:
        for i in order[params.top_k :]:
            p[i] = 0
    p /= p.sum()
    if params.top_p < 1:
        held = 0.0
        for i in order:
            before, held = held, held + p[i]
            if before >= params.top_p:
                p[i] = 0
        p /= p.sum()
    for i in range(len(p)):
        if p[i] < params.min_p * p.max():
            p[i] = 0
    return np.asarray(p / p.sum())


def rows(count: int, vocab: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def compare(found: Tensor, logits: Tensor, params: Seq[SamplingParams]) -> None:
    assert found.dtype == torch.float32 and found.shape == logits.shape
    for row, (p, each) in enumerate(zip(found, params, strict=True)):
        wanted = oracle(logits[row], each)
        assert np.array_equal(p.numpy() > 0, wanted > 0), each
        assert np.abs(p.numpy() - wanted).max() < 1e-6, each


COMBINATIONS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in product((0.0, 0.3, 1.0, 2.5), (0, -1, 1, 7, 1000), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.05, 0.6, 1.0))
]


@pytest.mark.parametrize("vocab", [2, 50, 1031])
def test_all_combinations_in_one_batch(vocab: int) -> None:
    logits = rows(len(COMBINATIONS), vocab)
    ids = torch.arange(len(COMBINATIONS))
    compare(seated(COMBINATIONS).for_batch(ids.tolist()).probs(logits, ids), logits, COMBINATIONS)


@pytest.mark.parametrize("params", COMBINATIONS[::7], ids=str)
def test_alone(params: SamplingParams) -> None:
    logits = rows(3, 50, seed=1)
    compare(seated([params]).for_batch([0]).probs(logits, torch.zeros(3, dtype=torch.int64)), logits, [params] * 3)


def test_rows_find_their_own_requests_numbers() -> None:
    """Several rows of one request, requests in any order, seats that take no part."""
    params = [SamplingParams(temperature=0.5), SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(top_p=0.4, min_p=0.1)]
    req_indices = torch.tensor([3, 3, 1, 0, 0, 1, 3])
    logits = rows(7, 40, seed=2)
    compare(seated(params).for_batch([3, 1, 0]).probs(logits, req_indices), logits, [params[i] for i in req_indices.tolist()])


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """To the last bit: else a seed's text would depend on who else is served."""
    logits = rows(len(COMBINATIONS), 50, seed=3)
    sampling, ids = seated(COMBINATIONS), torch.arange(len(COMBINATIONS))
    together = sampling.for_batch(ids.tolist()).probs(logits, ids)
    different = [
        COMBINATIONS[i]
        for i in ids.tolist()
        if not torch.equal(sampling.for_batch([i]).probs(logits[i : i + 1], ids[i : i + 1])[0], together[i])
    ]
    assert not different


def test_extreme_logits() -> None:
    params = [SamplingParams(temperature=t) for t in (2e-5, 0.01, 100.0)]
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e30, 1e30, -torch.inf], [5.0, 4.0, -torch.inf]])
    p = seated(params).for_batch([0, 1, 2]).probs(logits, torch.arange(3))
    assert torch.isfinite(p).all() and torch.allclose(p.sum(-1), torch.ones(3))
    assert p[0].tolist() == [1, 0, 0] and p[1].tolist() == [0.5, 0.5, 0] and p[2, 2] == 0


def test_ties_at_the_edge_stay_in() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(2, 5)
    params = [SamplingParams(top_k=2), SamplingParams(top_p=0.5)]
    p = seated(params).for_batch([0, 1]).probs(logits, torch.arange(2))
    assert (p > 0).tolist() == [[True, True, True, True, False]] * 2


@pytest.mark.parametrize("vary", ["seed", "index", "both"])
def test_numbers_are_uniform(vary: str) -> None:
    n = torch.arange(40_000 if selection.ALL else 10_000)
    many = seated([SamplingParams()] * len(n), seeds=(n - len(n) // 2).tolist() if vary != "index" else [12345] * len(n))
    index = n if vary != "seed" else torch.full_like(n, 12345)
    x = many.for_batch([0]).uniform(n, index.unsqueeze(1), 0).squeeze(1)
    assert x.dtype == torch.float64 and x.min() > 0 and x.max() < 1
    assert stats.kstest(x.numpy(), "uniform").pvalue > 1e-3
    assert x.unique().numel() == len(n)
    for apart in (1, 2, 3, 64):
        pairs, _, _ = np.histogram2d(x[:-apart].numpy(), x[apart:].numpy(), bins=8, range=[[0, 1], [0, 1]])
        assert stats.chisquare(pairs.flatten()).pvalue > 1e-3, apart


def test_streams_and_tokens_are_independent_of_each_other() -> None:
    sampler = seated([SamplingParams()] * 200, seeds=[i**3 - 5 for i in range(200)]).for_batch(range(200))
    index = torch.arange(100).expand(200, 100)
    x = torch.stack([sampler.uniform(torch.arange(200), index, stream) for stream in range(STREAMS)], 2)
    assert x.unique().numel() == x.numel()
    flat = x.flatten(0, 1).numpy()
    # A race's noise: exponential, another for every token, and not that of the plain numbers.
    noise = 1 / sampler.race(torch.ones(200, 6), torch.arange(200), torch.arange(200), 0)
    flat_noise = torch.stack([1 / sampler.race(torch.ones(200, 3), torch.arange(200), index[:, i], 2) for i in range(100)], 1)
    assert stats.kstest(flat_noise.flatten().numpy(), "expon").pvalue > 1e-3 and noise.unique().numel() == noise.numel()
    columns = np.concatenate([flat, (1 - (-flat_noise).exp()).flatten(0, 1).numpy()], 1)
    for a in range(6):
        for b in range(a):
            pairs, _, _ = np.histogram2d(columns[:, a], columns[:, b], bins=8, range=[[0, 1], [0, 1]])
            assert stats.chisquare(pairs.flatten()).pvalue > 1e-3


def test_numbers_follow_from_seed_and_index_alone() -> None:
    seeds = [5, -1, 2**63 - 1, -(2**63), 5]
    sampling = seated([SamplingParams()] * 5, seeds)
    index = torch.tensor([[3, 4], [0, 1], [7, 8], [2, 3], [3, 4]])
    together = sampling.for_batch(range(5)).uniform(torch.arange(5), index, 1)
    raced = sampling.for_batch(range(5)).race(torch.ones(5, 9), torch.arange(5), index[:, 0], 1)
    for i in range(5):
        one_seat = seated([SamplingParams(temperature=0.5, top_k=3)], seeds[i : i + 1])
        alone = one_seat.for_batch([0]).uniform(torch.zeros(1, dtype=torch.int64), index[i : i + 1], 1)
        assert torch.equal(alone[0], together[i])
        race = one_seat.for_batch([0]).race(torch.ones(1, 9), torch.zeros(1, dtype=torch.int64), index[i : i + 1, 0], 1)
        assert torch.equal(race[0], raced[i])
    assert torch.equal(together[0], together[4]) and not torch.equal(together[0], together[1])
    later = sampling.for_batch([0]).uniform(torch.tensor([0]), torch.tensor([[4]]), 1)
    assert torch.equal(later[0, 0], together[0, 1]), "the same token's numbers, wherever its row stands in the step"


def test_what_a_batch_asks_for() -> None:
    sampling = seated([SamplingParams(temperature=0), SamplingParams(temperature=1e-6), SamplingParams()])

    def greedy(*seats: int) -> bool:
        sampler: BatchSampler = sampling.for_batch(seats)
        return sampler.all_greedy

    assert greedy(0, 1) and not greedy(0, 2) and not greedy(2)
