"""Logits to probabilities, per request: temperature, then top-k, top-p, min-p, each on what the one before it left; and the draws.

Acceptance and drafting use the same transforms, so that proposals come from the law by which they are judged. Random numbers are
a function of (seed, index of the token, stream): who else is in the batch cannot change them.

A token is drawn by a race: each has its probability divided by exponential noise of its own, and the largest wins. Whoever races
with the same noise over a similar distribution mostly finds the same winner, which is what lets drafts guess a random choice
(Daliri et al. 2024, https://arxiv.org/abs/2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Verdict
from mtpserve.core.protocols import SeatParameters
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.sequence import Sequence
from mtpserve.runtime.rules import LogitRules

STREAMS = 3
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15


class SeatSampling:
    """Every seat's parameters, on the device and, to skip what nobody asked for, on the host."""

    def __init__(self, seats: int, rules: LogitRules, device: torch.device) -> None:
        self.device, self.rules = device, rules
        # One column of each is written at admission; every row has its name.
        self.numbers = torch.zeros(3, seats, device=device)
        self.integers = torch.zeros(2, seats, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p = self.numbers.unbind(0)
        self.top_k, self.seed = self.integers.unbind(0)
        self.coupled = torch.zeros(seats, dtype=torch.bool, device=device)
        self.params = [SamplingParams()] * seats
        self.couples = [False] * seats

    def admit(self, seq: Sequence) -> None:
        seat, params = seq.seat, seq.sampling
        assert seat is not None
        self.params[seat] = params
        self.numbers[:, seat] = torch.tensor((0.0 if params.greedy else params.temperature, params.top_p, params.min_p))
        self.integers[:, seat] = torch.tensor((max(params.top_k, 0), seq.seed))
        # Their drafts come from several sources, of which only one could say from which distribution it drew.
        self.coupled[seat] = self.couples[seat] = seq.grammar is not None or bool(seq.prediction)
        self.rules.admit(seq)

    def for_batch(self, seqs: Seq[Sequence], coupled: bool = False) -> BatchSampler:
        """`coupled`: all requests' drafts are point masses."""
        return BatchSampler(self, seqs, coupled)


class BatchSampler:
    """core.protocols.Sampler for the requests of one step."""

    def __init__(self, seats: SeatSampling, seqs: Seq[Sequence], coupled: bool) -> None:
        self.seats, self.seqs, self.all_coupled = seats, seqs, coupled
        params = [seq.sampling for seq in seqs]
        self.all_greedy = all(p.greedy for p in params)
        self.any_greedy = any(p.greedy for p in params)
        self.largest_k = max((p.top_k for p in params), default=0)
        self.any_top_p = any(p.top_p < 1 for p in params)
        self.any_min_p = any(p.min_p > 0 for p in params)
        self.top_logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        self.rules = seats.rules.for_batch(seqs)

    @property
    def has_rules(self) -> bool:
        return self.rules is not None

    @property
    def parameters(self) -> SeatParameters:
        seats, cuts = self.seats, (self.largest_k > 0, self.any_top_p, self.any_min_p)
        return SeatParameters(seats.temperature, seats.top_k, seats.top_p, seats.min_p, seats.seed, seats.coupled, *cuts)

    def processed(self, logits: Tensor, seat_ids: Tensor, path: Tensor, count: Tensor) -> Tensor:
        return logits if self.rules is None else self.rules.apply(logits, seat_ids, path, count)

    def forced(self, limit: int, seat_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self.rules is None else self.rules.forced(limit, seat_ids)

    def advance(self, batch: Batch, verdict: Verdict) -> None:
        if self.rules is not None:
            self.rules.advance(batch, verdict)

    def greedy(self, seat_ids: Tensor) -> Tensor:
        return self.seats.temperature[seat_ids] == 0

    def coupled(self, seat_ids: Tensor) -> Tensor | None:
        if self.all_coupled:
            return torch.ones_like(seat_ids, dtype=torch.bool)
        return self.seats.coupled[seat_ids] if any(self.seats.couples[seq.seat] for seq in self.seqs if seq.seat is not None) else None

    def probs(self, logits: Tensor, seat_ids: Tensor) -> Tensor:
        seats = self.seats
        temperature = seats.temperature[seat_ids].unsqueeze(1)
        greedy = temperature == 0
        # Divided after the maximum is taken off: a small temperature must not overflow.
        scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.masked_fill(greedy, 1.0)
        if self.largest_k > 0:
            scaled = keep_top_k(scaled, seats.top_k[seat_ids], self.largest_k)
        p = scaled.softmax(-1)
        if self.any_top_p:
            p = keep_top_p(p, seats.top_p[seat_ids].unsqueeze(1))
        if self.any_min_p:
            min_p = seats.min_p[seat_ids].unsqueeze(1)
            p = renormalised(p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0), min_p > 0)
        if self.any_greedy:
            point = torch.zeros_like(p).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
            p = torch.where(greedy, point, p)
        return p

    def uniform(self, seat_ids: Tensor, index: Tensor, stream: int) -> Tensor:
        return unit(finalise(self.key(seat_ids.unsqueeze(1), index, stream)))

    def race(self, weights: Tensor, seat_ids: Tensor, index: Tensor, stream: int) -> Tensor:
        key = finalise(self.key(seat_ids, index, stream)).unsqueeze(1)
        tokens = torch.arange(1, weights.shape[1] + 1, device=weights.device)
        return weights.double() / -torch.log1p(-unit(finalise(key + tokens * GOLDEN)))

    def choose(self, weights: Tensor, seat_ids: Tensor, index: Tensor, stream: int) -> Tensor:
        return self.race(weights, seat_ids, index, stream).argmax(-1)

    def key(self, seat_ids: Tensor, index: Tensor, stream: int) -> Tensor:
        return finalise((index * STREAMS + stream) * GOLDEN) ^ self.seats.seed[seat_ids]


def keep_top_k(logits: Tensor, k: Tensor, largest: int) -> Tensor:
    """logits [rows, vocabulary]; k [rows], 0 is off. Ties with the k-th stay in."""
    values = logits.topk(min(largest, logits.shape[1]), -1).values
    last = values.gather(1, (k.clamp(1, values.shape[1]) - 1).unsqueeze(1))
    return logits.masked_fill((logits < last) & (k > 0).unsqueeze(1), -torch.inf)


def keep_top_p(p: Tensor, top_p: Tensor) -> Tensor:
    """The smallest set of most likely tokens that holds top_p of the mass, renormalised; ties with its last stay in."""
    ordered = p.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    return renormalised(p.masked_fill((p < least) & (top_p < 1), 0), top_p < 1)


def renormalised(p: Tensor, rows: Tensor) -> Tensor:
    """The other rows stay as they are to the last bit: what one request asks for must not show in another's numbers."""
    return p / p.sum(-1, keepdim=True).masked_fill(~rows, 1.0)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def unit(bits: Tensor) -> Tensor:
    """int64 → (0, 1) float64, both ends left out: a race divides by the logarithm."""
    return (shifted(bits, 12).double() + 0.5) * 2.0**-52


def finalise(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele et al. 2014), a bijection of int64 in which every bit depends on every bit."""
    x = (x ^ shifted(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ shifted(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ shifted(x, 31)
