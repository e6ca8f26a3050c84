"""Logits to probabilities, per request: temperature, then top-k, top-p, min-p, each on what the one before it
left; and the draws.

Acceptance and proposals use the same transforms: the distribution that proposes tokens decides about them.
Random numbers are a function of (seed, index of the token, stream): the rest of the batch cannot change them.

A token is drawn by a race: each has its probability divided by exponential noise of its own, and the largest
wins. A race with the same noise over a similar distribution mostly has the same winner, so that a random
choice can be guessed (Daliri et al. 2024, https://arxiv.org/abs/2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from mtpserve_kernels.noise import finalise, keyed, noise, unit
from torch import Tensor

from mtpserve.core.batch import Batch, SamplingTensors, VerifyOutput
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rule_tables import TableRules
from mtpserve.runtime.sampling.rules import BatchRules, LogitRules

LOGPROBS = 20  # the alternatives that a captured step gives where a request wants no more


def power_of_two(number: int) -> int:
    """The smallest one that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFeatures:
    """What a batch's requests need of the sampler, all together: what none of them needs is skipped."""

    all_greedy: bool = False
    any_greedy: bool = False
    largest_k: int = 0
    any_top_p: bool = False
    any_min_p: bool = False
    any_coupled: bool = False  # some request's proposals are point masses
    all_coupled: bool = False
    top_logprobs: int | None = None
    rules: bool = False  # some request has a rule that the device reads from tables
    masks: bool = False  # some request has a grammar that bears on the step
    adapters: bool = False  # some request has one: the layers compute more

    @classmethod
    def of(cls, requests: Seq[RunnerRequest], coupled: bool) -> SamplingFeatures:
        """`coupled`: all requests' proposals are point masses."""
        params = [request.sampling for request in requests]
        return cls(
            all_greedy=all(p.greedy for p in params),
            any_greedy=any(p.greedy for p in params),
            largest_k=max((p.top_k for p in params), default=0),
            any_top_p=any(p.top_p < 1 for p in params),
            any_min_p=any(p.min_p > 0 for p in params),
            any_coupled=any(request.new_request.point_masses for request in requests),
            all_coupled=coupled,
            top_logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
            rules=any(request.has_table_rules for request in requests),
            masks=any(not request.is_simple and request.is_constrained for request in requests),
            adapters=any(request.new_request.adapter_slot >= 0 for request in requests),
        )

    def rounded(self) -> SamplingFeatures:
        """One for many: does the same for these requests, with a little more work, and there are few of
        them."""
        top = None if self.top_logprobs is None else max(LOGPROBS, power_of_two(self.top_logprobs))
        if self.all_greedy and not self.rules:
            return replace(
                self, any_greedy=True, largest_k=0, any_top_p=False, any_min_p=False, any_coupled=False,
                top_logprobs=top,
            )  # fmt: skip
        cuts = self.rules or self.largest_k > 0 or self.any_top_p or self.any_min_p
        largest = max(64, power_of_two(self.largest_k)) if cuts else 0
        return replace(
            self, all_greedy=False, any_greedy=True, largest_k=largest, any_top_p=cuts, any_min_p=cuts,
            top_logprobs=top,
        )  # fmt: skip

    @property
    def general(self) -> SamplingFeatures:
        """One for nearly all, with more work."""
        return replace(self, all_greedy=False, any_top_p=True).rounded()


def usual_features(coupled: bool) -> list[SamplingFeatures]:
    """The usual parameters: no temperature, temperature alone, or with any of top_k, top_p and min_p.
    `coupled` as in SamplingFeatures."""
    cuts = ((True, 0, False), (False, 0, False), (False, 1, True))
    features = [
        SamplingFeatures(
            all_greedy=greedy,
            any_greedy=True,
            largest_k=top_k,
            any_top_p=top_p,
            any_min_p=top_p,
            all_coupled=coupled,
        )
        for greedy, top_k, top_p in cuts
    ]
    return [one.rounded() for one in features]


class SamplingState:
    """Every seat's parameters; one seat more than requests can run pads batches."""

    def __init__(self, seats: int, rules: LogitRules, device: torch.device) -> None:
        self.device, self.rules = device, rules
        seats += 1
        # One column of each is written at admission; every row has its name.
        self.numbers = torch.zeros(3, seats, device=device)
        self.integers = torch.zeros(2, seats, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p = self.numbers.unbind(0)
        self.top_k, self.seed = self.integers.unbind(0)
        self.coupled = torch.zeros(seats, dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        return (
            self.numbers.nbytes
            + self.integers.nbytes
            + self.coupled.nbytes
            + self.rules.penalties.nbytes
            + self.rules.least.nbytes
        )


class BatchSampler:
    """core.protocols.Sampler for the requests of one step."""

    def __init__(
        self,
        state: SamplingState,
        features: SamplingFeatures,
        rules: BatchRules | TableRules | None = None,
    ) -> None:
        self.state, self.features, self.rules = state, features, rules

    @property
    def all_greedy(self) -> bool:
        return self.features.all_greedy

    @property
    def all_coupled(self) -> bool:
        return self.features.all_coupled

    @property
    def top_logprobs(self) -> int | None:
        return self.features.top_logprobs

    @property
    def has_rules(self) -> bool:
        return bool(self.rules)

    @property
    def parameters(self) -> SamplingTensors:
        state, cuts = (
            self.state,
            (self.features.largest_k > 0, self.features.any_top_p, self.features.any_min_p),
        )
        return SamplingTensors(
            state.temperature, state.top_k, state.top_p, state.min_p, state.seed, state.coupled, *cuts
        )

    def processed(self, logits: Tensor, req_indices: Tensor, path: Tensor, count: Tensor) -> Tensor:
        return logits if self.rules is None else self.rules.apply(logits, req_indices, path, count)

    def forced(self, limit: int, req_indices: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self.rules is None else self.rules.forced(limit, req_indices)

    def advance(self, batch: Batch, verify_output: VerifyOutput) -> None:
        if self.rules is not None:
            self.rules.advance(batch, verify_output)

    def greedy(self, req_indices: Tensor) -> Tensor:
        return self.state.temperature[req_indices] == 0

    def coupled(self, req_indices: Tensor) -> Tensor | None:
        if self.all_coupled:
            return torch.ones_like(req_indices, dtype=torch.bool)
        return self.state.coupled[req_indices] if self.features.any_coupled else None

    def probs(self, logits: Tensor, req_indices: Tensor) -> Tensor:
        state, features = self.state, self.features
        temperature = state.temperature[req_indices].unsqueeze(1)
        greedy = temperature == 0
        # Divided after the maximum is taken off: a small temperature must not overflow.
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.masked_fill(greedy, 1.0)
        if features.largest_k > 0:
            scaled = keep_top_k(scaled, state.top_k[req_indices], features.largest_k)
        p = scaled.softmax(-1)
        if features.any_top_p:
            p = keep_top_p(p, state.top_p[req_indices].unsqueeze(1))
        if features.any_min_p:
            min_p = state.min_p[req_indices].unsqueeze(1)
            p = renormalised(p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0), min_p > 0)
        if features.any_greedy:
            point = torch.zeros_like(p).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
            p = torch.where(greedy, point, p)
        return p

    def uniform(self, req_indices: Tensor, index: Tensor, stream: int) -> Tensor:
        return unit(finalise(self.key(req_indices.unsqueeze(1), index, stream)))

    def race(self, weights: Tensor, req_indices: Tensor, index: Tensor, stream: int) -> Tensor:
        return weights.double() / noise(self.key(req_indices, index, stream), weights.shape[1])

    def choose(self, weights: Tensor, req_indices: Tensor, index: Tensor, stream: int) -> Tensor:
        return self.race(weights, req_indices, index, stream).argmax(-1)

    def key(self, req_indices: Tensor, index: Tensor, stream: int) -> Tensor:
        return keyed(self.state.seed[req_indices], index, stream)


def keep_top_k(logits: Tensor, k: Tensor, largest: int) -> Tensor:
    """logits [rows, vocabulary]; k [rows], 0 is off. Ties with the k-th stay in."""
    values = logits.topk(min(largest, logits.shape[1]), -1).values
    last = values.gather(1, (k.clamp(1, values.shape[1]) - 1).unsqueeze(1))
    return logits.masked_fill((logits < last) & (k > 0).unsqueeze(1), -torch.inf)


def keep_top_p(p: Tensor, top_p: Tensor) -> Tensor:
    """The smallest set of most likely tokens that holds top_p of the mass, renormalised; ties with its last
    stay in."""
    ordered = p.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    return renormalised(p.masked_fill((p < least) & (top_p < 1), 0), top_p < 1)


def renormalised(p: Tensor, rows: Tensor) -> Tensor:
    """The other rows stay as they are to the last bit: one request's parameters must not change another's
    numbers."""
    return p / p.sum(-1, keepdim=True).masked_fill(~rows, 1.0)
