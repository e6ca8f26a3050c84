"""How long the engine's steps take on this machine, learned from the steps that it computes.

Steps that are alike (rows, passes, requests; greedy or sampled) share a cell. Machines get slower and faster
while they serve, by what else runs on them, by more experts that texts need: an observation is a cell's usual
time by a factor that all cells share,

    log seconds = log (cell + context) + log pace + noise

of which all are estimated at once, each corrected as far as it is uncertain (a Kalman filter's gains, Kalman
1960; the pace may always change). `context` is what attention to the tokens before a step's rows takes. It is
no factor of the cells, which are first measured with short texts: further rows of a request add much less to
it than to products. So a depth that was last computed a minute ago is compared with one that is computed now.

Prompts beside requests that decode add what they have added lately: a part that every step with prompts has,
and one for each of their rows. On a GPU the former is more than 0 where such steps are launched kernel by
kernel, and less where a step without prompts has room for more rows. Each further row of a request takes as
much as one of a prompt in such a step.

Between the cells, and where nothing was measured yet, a formula with non-negative coefficients is fitted:

    seconds = c0 + c1 · min(rows, 8) + c2 · rows + c3 · (rows above 16) + c4 · (rows above 64) + c5 · (rows
    above 256)
                 + c6 · passes + c7 · passes · requests

The first term is what weights cost to read, the next ones what rows cost to multiply: concave on a CPU, flat
and then rising on a GPU. By what a cell differs from the formula, steps like its own are expected to differ,
too. Where only some of a step's requests have further rows, steps with none and with all of these rows tell
together. By the formula alone, a few further rows would seem to make a step faster where steps without them
take longer than the formula says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp, log, log2
from operator import mul
from typing import NamedTuple

from mtpserve.core.stats.reports import StepCosts, StepTime

# Observations of a cell that count, and over which the pace is followed. Most of what is observed is the
# depth that is in use: were the two nearer to each other, its cell would take over what makes all steps
# slower for some seconds, and other depths would seem to be faster.
KEPT, FOLLOWED = 200, 4
UNKNOWN = 4.0  # variance of a pace of which nothing is known, relative to that of an observation
# of an observation's logarithm: more than that is a disturbance, and counts as so much
SLOWER, FASTER = 0.3, 1.0
# observations, or seconds of observed steps, between two fits, which take 1 ms; fewer at the beginning
REFIT, REFIT_S = 512, 4.0
SWEEPS = 120  # of coordinate descent in each
# numbers up to this are cells of their own; larger ones share one with those that differ by less than a
# seventh
EXACT = 8
BENDS = (16, 64, 256)  # rows from which on more may cost more
NAMES = (
    "step",
    "first_rows",
    "rows",
    *(f"rows_above_{bend}" for bend in BENDS),
    "passes",
    "passes_x_requests",
)
TERMS = len(NAMES)
PROVISIONAL = 0.1  # weight of what was measured before the engine served
FULL = 1.0  # observations after which a cell counts for half against the formula
# Observations that a cell begins with, at most: a sampled one with those of the greedy one, and one that was
# measured before the engine served. Both are off by ten percent and more, and a depth that is not in use has
# a few observations in a second: with 5 and 20 in their place an error of 15 % was still there after seconds.
BORROWED, IDLE = 1, 2
NOISE = 0.07  # of an observation's logarithm
CONTEXT = 4096  # tokens of context that may be expected to take as long as a step of one request
# what a request's further rows add to attention's time, each, relative to the first one: all read the same
# keys and values
FURTHER = 0.4
SURE = 0.01  # variance of what context takes, of a step's time, from which on it is followed
# share of a step in what is known of the one after it; of steps that have prompts, less does not matter
RECENT, FEW = 0.97, 0.02
PROMPTS = 0.05  # share of the last step with a prompt in what prompts take
# What rows of prompts take each is seen where steps have more and fewer of them. Without that it is their
# mean: this share of a mean number's square is what their variance is compared with.
ALIKE = 0.02
# of `PromptTimes.steps`, after which one that takes far longer than expected is a disturbance, too
TRUSTED = 10.0
LEAST = 0.25  # of a step's time that counts at least, where rows of prompts have room in it
STEEPEST = 2.0  # times the mean that a row takes, at most


class StepWork(NamedTuple):
    """What is in a step."""

    requests: int  # that decode
    rows: int  # of the trunk, without those of prompts
    passes: int  # after the trunk's
    sampled: bool = False  # some of the requests are not greedy: drawing costs by rows
    context: int = 0  # tokens before the rows, of all requests


class CellKey(NamedTuple):
    requests: int
    rows: int
    passes: int
    sampled: bool


@dataclass(slots=True)
class Cell:
    """`last`: the number of the observation that was the last; None: there was none while the engine
    served."""

    terms: list[float]  # means of its steps'
    log: float  # of its seconds at the usual pace
    seen: int = 0
    last: int | None = None


@cache
def bucket(number: int) -> int:
    return number if number <= EXACT else EXACT + round(5 * log2(number / EXACT))


def middle(bucket: int) -> int:
    """One of the numbers that share it."""
    return bucket if bucket <= EXACT else round(EXACT * 2 ** ((bucket - EXACT) / 5))


def key_of(work: StepWork) -> CellKey:
    return CellKey(bucket(work.requests), bucket(work.rows), work.passes, work.sampled)


def terms_of(work: StepWork) -> list[float]:
    requests, rows, passes = work[:3]
    convex = (max(rows - bend, 0) for bend in BENDS)
    return [1.0, min(rows, EXACT), rows, *convex, passes, passes * requests]


def tokens_of(work: StepWork) -> float:
    """Of context, with what further rows add."""
    return work.context * (1 + FURTHER * (work.rows / work.requests - 1)) if work.requests else 0.0


@dataclass(slots=True)
class PromptTimes:
    """What the last steps' prompts have added, at the usual pace: sums over these steps, each of which counts
    less than the next one."""

    steps: float = 0.0
    rows: float = 0.0
    squares: float = 0.0  # of rows
    took: float = 0.0  # seconds
    products: float = 0.0  # of rows and seconds
    further: float = 0.0  # rows of the requests, without each one's first
    alone: float = 0.0  # seconds that these take in steps without prompts

    def observe(self, rows: int, seconds: float, further: int, alone: float) -> None:
        old = 1 - PROMPTS
        self.steps, self.rows, self.squares = (
            old * self.steps + 1,
            old * self.rows + rows,
            old * self.squares + rows * rows,
        )
        self.took, self.products = old * self.took + seconds, old * self.products + rows * seconds
        self.further, self.alone = old * self.further + further, old * self.alone + alone

    @property
    def row(self) -> float:
        """Seconds for each row: the slope of a line through the steps (a ridge regression towards the
        mean)."""
        middle = self.rows / self.steps
        alike = ALIKE * middle * self.rows
        varied = self.squares - middle * self.rows + alike
        together = self.products - middle * self.took + alike * self.took / self.rows
        return min(max(together / varied, 0.0), STEEPEST * self.took / self.rows)

    @property
    def part(self) -> float:
        """Seconds that a step with prompts takes more whatever their rows; less than 0 where it has room for
        some."""
        return (self.took - self.row * self.rows - self.crowded(self.further, self.alone)) / self.steps

    def crowded(self, further: float, alone: float) -> float:
        """Seconds that are added for further rows of requests, which take so long without prompts: beside
        these each takes what a row of a prompt takes, since prompts fill up the room for more rows that a
        step has on a GPU."""
        return max(self.row * further - alone, 0.0) if further else 0.0

    def seconds(self, rows: int) -> float:
        """That so many rows add; less than 0 where there is room for more."""
        return self.part + self.row * rows


class StepTimes:
    """`apart`: prompts have passes of their own, so that further rows of requests cost nothing more beside
    them, but all that comes after the trunk's pass is there twice."""

    def __init__(self, apart: bool = False) -> None:
        self.apart = apart
        self.cells: dict[CellKey, Cell] = {}
        self.coefficients = [0.0] * TERMS  # at the usual pace
        self.pace = 0.0  # logarithm of how much longer steps take now than usually
        self.observed = 0
        self._unfitted = 0.0  # seconds of what was observed since the last fit
        self._fullest: dict[int, float] = {}  # most rows for each request in a step of so many passes
        self.token = 0.0  # seconds that a token of context takes at the usual pace
        self._unsure = 0.0  # its variance, relative to that of an observation
        self._prompts = PromptTimes()
        # of the last steps: how many, the tokens that they yielded, and how many had prompts
        self._beside = 1.0, 1.0, 0.0
        # observations by which the pace was learned; None: the usual one is being measured
        self._paced: int | None = None

    def observe(self, work: StepWork, seconds: float, noise: float = 1.0) -> None:
        """A step took so long. `noise`: variance, relative to that of other observations."""
        key, duration = key_of(work), max(seconds, 1e-9) * exp(-self.pace)
        cell = self.cells.get(key)
        if cell is None and (greedy := self._greedy(work)) is not None:
            cell = self.cells[key] = Cell(terms_of(work), greedy.log, min(greedy.seen, BORROWED))
        if cell is None:
            cell = self.cells[key] = Cell(
                terms_of(work), log(max(duration - self._attention(work), duration / 4))
            )
        else:
            self._correct(cell, work, duration, noise)
        cell.seen += 1
        if work.requests:
            self._fullest[work.passes] = max(self._fullest.get(work.passes, 1.0), work.rows / work.requests)
        if max(work.requests, work.rows) > EXACT:
            share, terms = 1 / min(cell.seen, KEPT), terms_of(work)
            cell.terms = [old + share * (new - old) for old, new in zip(cell.terms, terms, strict=True)]
        self.observed += 1
        cell.last = None if self._paced is None else self.observed
        self._unfitted += seconds
        if (
            self.observed % REFIT == 0
            or self.observed in (4, 8, 16, 32, 64, 128, 256)
            or self._unfitted > REFIT_S
        ):
            self.fit()

    def prompts(self, work: StepWork, rows: int) -> float:
        """Seconds that so many rows of prompts are expected to add to such a step."""
        if self._prompts.steps:
            return max(self._prompts.seconds(rows) * exp(self.pace) + self.more_beside_prompts(work), 0.0)
        alone, together = terms_of(work), terms_of(work._replace(rows=work.rows + rows))
        return (self._formula(together) - self._formula(alone)) * exp(self.pace)

    def observe_prompts(self, work: StepWork, rows: int, seconds: float) -> None:
        """A step with so many rows of prompts took so long."""
        alone = self.seconds(work)
        if alone > 0:
            limit = (alone + self.prompts(work, rows)) * exp(
                SLOWER if self._prompts.steps > TRUSTED else FASTER
            )
            pace = exp(-self.pace)
            added = max(min(seconds, limit) - alone, 0.0)
            if self.apart:
                self._prompts.observe(rows, max(added - self.more_beside_prompts(work), 0.0) * pace, 0, 0.0)
            else:
                further = alone - self.seconds(work._replace(rows=work.requests))
                self._prompts.observe(rows, added * pace, work.rows - work.requests, max(further, 0.0) * pace)

    def count(self, tokens: float, prompts: bool) -> None:
        """A step is expected to have yielded so many tokens, and had rows of prompts, or none."""
        steps, yielded, beside = self._beside
        self._beside = RECENT * steps + 1, RECENT * yielded + tokens, RECENT * beside + prompts

    def with_prompts(self, work: StepWork, tokens: float, none: float | None = None) -> float:
        """As `seconds`, on average where some steps have rows of prompts: with what a step with prompts takes
        more whatever their rows, and without what each of these rows takes, which is the same per token at
        any depth. `tokens`: that such a step yields; the more there are, the more steps have prompts, which
        begin independently of each other. `none`: seconds of such a step without further rows."""
        steps, yielded, beside = self._beside
        seconds = self.seconds(work)
        if beside < FEW * steps or not self._prompts.steps:
            return seconds
        share: float = 1 - max(1 - beside / steps, 0.0) ** (tokens * steps / yielded)
        more = self._more_beside_prompts(work, seconds, none)
        return max(seconds + share * (more + self._prompts.part * exp(self.pace)), LEAST * seconds)

    def more_beside_prompts(self, work: StepWork) -> float:
        """Seconds that a step takes longer with prompts since there are further rows and passes, whatever the
        rows of the prompts."""
        return self._more_beside_prompts(work, self.seconds(work))

    def _more_beside_prompts(self, work: StepWork, seconds: float, none: float | None = None) -> float:
        further, pace = work.rows - work.requests, exp(self.pace)
        if self.apart:
            return work.passes * sum(self.coefficients[-2:]) * pace  # as of one request: see `terms_of`
        if not further or not self._prompts.steps:
            return 0.0
        alone = seconds - (self.seconds(work._replace(rows=work.requests)) if none is None else none)
        return self._prompts.crowded(further, max(alone, 0.0) / pace) * pace

    def _correct(self, cell: Cell, work: StepWork, duration: float, noise: float) -> None:
        base = exp(cell.log)
        usual = base + self._attention(work)
        error = min(max(log(duration / usual), -FASTER), SLOWER)
        base, token = base / usual, tokens_of(work) / usual  # by how much the logarithm changes with each
        cells, tokens = 1 / min(cell.seen, KEPT) * base**2, self._unsure * token**2
        if self._paced is None:
            paces = 0.0
        else:
            paces = 1 / min(self._paced, FOLLOWED) if self._paced else UNKNOWN
            self._paced += 1
        total = cells + paces + tokens + noise
        cell.log += error * cells / base / total
        self.pace += error * paces / total
        if tokens:
            self.token = max(self.token + error * tokens / token / total, 0.0)
            self._unsure *= max(1 - tokens / total, min(SURE / tokens, 1.0))

    def serve(self) -> None:
        """What is known so far was measured on an idle machine, whose pace is another one."""
        self.fit()
        self._paced = 0
        self._unsure = (self.seconds(StepWork(1, 1, 0)) / CONTEXT / NOISE) ** 2
        for cell in self.cells.values():
            cell.last, cell.seen = None, min(cell.seen, IDLE)

    def seconds(self, work: StepWork) -> float:
        """Expected; 0 before anything was fitted. Of sampled steps that were not seen yet what greedy ones
        take."""
        differs, weight = self._differs(work)
        expected = self._formula(terms_of(work)) * exp(weight * differs + (1 - weight) * self._between(work))
        return (expected + self._attention(work)) * exp(self.pace)

    def _differs(self, work: StepWork) -> tuple[float, float]:
        """By what the logarithm of a cell differs from the formula's, and how far that is known, from 0 to
        1."""
        cell = self.cells.get(key_of(work)) or self._greedy(work)
        if cell is None or (usual := self._formula(cell.terms)) <= 0:
            return 0.0, 0.0
        return cell.log - log(usual), cell.seen / (cell.seen + FULL)

    def _between(self, work: StepWork) -> float:
        """By what it is expected to differ, by the cells of steps where none and all of the same requests
        have further rows."""
        requests, rows, passes, sampled, _ = work
        further = requests * (self._fullest.get(passes, 1.0) - 1)
        if not requests < rows < requests + further:
            return 0.0
        share = (rows - requests) / further
        none, none_known = self._differs(StepWork(requests, requests, 0, sampled))
        all_, all_known = self._differs(StepWork(requests, requests + round(further), passes, sampled))
        return (1 - share) * none_known * none + share * all_known * all_

    def _attention(self, work: StepWork) -> float:
        """Seconds at the usual pace that the context takes."""
        return self.token * tokens_of(work)

    def _greedy(self, work: StepWork) -> Cell | None:
        return self.cells.get(key_of(work._replace(sampled=False)))

    def age(self, work: StepWork) -> int | None:
        """Observations since a step like it; None: there was none that served."""
        cell = self.cells.get(key_of(work))
        return None if cell is None or cell.last is None else self.observed - cell.last

    def costs(self) -> StepCosts:
        """For people."""
        scale = 1000 * exp(self.pace)
        steps = [
            StepTime(
                middle(key.requests),
                middle(key.rows),
                middle(key.passes),
                key.sampled,
                round(scale * exp(cell.log), 4),
                cell.seen,
            )
            for key, cell in sorted(self.cells.items())
        ]
        values = [*self.coefficients, self.token]
        return StepCosts(
            steps,
            {name: scale * value for name, value in zip((*NAMES, "context_tokens"), values, strict=True)},
        )

    def _formula(self, terms: list[float]) -> float:
        return float(sum(map(mul, self.coefficients, terms)))

    def fit(self) -> None:
        """Least squares of relative errors over the cells, each coefficient at least 0, by coordinate
        descent."""
        self._unfitted = 0.0
        normal = [[0.0] * TERMS for _ in range(TERMS)]
        right = [0.0] * TERMS
        for cell in self.cells.values():
            time = exp(cell.log)
            weight = min(cell.seen, KEPT) * (PROVISIONAL if cell.last is None else 1) / time**2
            for i, a in enumerate(cell.terms):
                if a:
                    right[i] += weight * a * time
                    row = normal[i]
                    for j, b in enumerate(cell.terms):
                        row[j] += weight * a * b
        coefficients = self.coefficients
        for _ in range(SWEEPS):
            for i in range(TERMS):
                if normal[i][i] > 0:
                    rest = right[i] - sum(normal[i][j] * coefficients[j] for j in range(TERMS) if j != i)
                    coefficients[i] = max(rest / normal[i][i], 0.0)
