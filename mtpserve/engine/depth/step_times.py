"""How long the engine's steps take on this machine, learned from the steps that it computes.

Steps of the same rows, passes and requests share a cell; greedy and sampled steps do not. A machine's pace
changes while it serves: other programs run, and texts need more experts. So an observation is a cell's usual
time by a factor that all cells share,

    log seconds = log (cell + context) + log pace + noise

All of these are estimated at once. Each one is corrected as far as it is uncertain (a Kalman filter's gains,
Kalman 1960; the pace may always change). So a depth that was last computed a minute ago is compared with one
that is computed now. `context` is the time of attention to the tokens before a step's rows. It is no factor
of the cells, which are first measured with short texts: further rows add much less to it than to products.

Between the cells, and where nothing was measured yet, a formula with non-negative coefficients is fitted:

    seconds = c0 + c1 · min(rows, 8) + c2 · rows + c3 · (rows above 16) + c4 · (rows above 64) + c5 · (rows
    above 256)
                 + c6 · passes + c7 · passes · requests

The first term is what weights cost to read, the next ones what rows cost to multiply: concave on a CPU, flat
and then rising on a GPU. By what a cell differs from the formula, steps like its own are expected to differ.
Where only some of a step's requests have further rows, two cells tell together: no request has further rows
in the first one, and all have in the second. The formula alone may expect that a few further rows make a step
faster, where steps without them take longer than it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from operator import mul

from mtpserve.core.stats.reports import StepCosts, StepTime
from mtpserve.engine.depth.depth_config import CONFIG, DepthPolicyConfig
from mtpserve.engine.depth.prompt_times import PromptTimes
from mtpserve.engine.depth.step_shapes import TERM_NAMES, CellKey, StepWork, key_of, middle, terms_of

NUM_TERMS = len(TERM_NAMES)


@dataclass(slots=True)
class Cell:
    """The time of like steps."""

    terms: list[float]  # means of its steps'
    log_seconds: float  # at the usual pace
    num_observations: int = 0
    last_observation: int | None = None  # its number; None: there was none while the engine served


class StepTimes:
    """`apart`: prompts have passes of their own. Further rows of requests cost nothing more beside them then,
    but all that comes after the trunk's pass is there twice."""

    def __init__(self, apart: bool = False, config: DepthPolicyConfig = CONFIG) -> None:
        self.apart, self.config = apart, config
        self.cells: dict[CellKey, Cell] = {}
        self.coefficients = [0.0] * NUM_TERMS  # at the usual pace
        self.log_pace = 0.0  # logarithm of how much longer steps take now than usually
        self.num_observations = 0
        self._unfitted_s = 0.0  # seconds of steps since the last fit
        self._max_rows: dict[int, float] = {}  # for each request in a step of so many passes
        self.token_s = 0.0  # seconds that a token of context takes at the usual pace
        self._token_variance = 0.0  # relative to that of an observation
        self._prompts = PromptTimes(config)
        # of the last steps: how many, the tokens that they yielded, and how many had prompts
        self._recent = 1.0, 1.0, 0.0
        # observations by which the pace was learned; None: the usual one is being measured
        self._num_paces: int | None = None

    # ------------------------------------------------------------------------------------------- observations

    def observe(self, work: StepWork, seconds: float, noise: float = 1.0) -> None:
        """A step took `seconds`. `noise`: variance, relative to that of other observations."""
        key, duration = key_of(work), max(seconds, 1e-9) * exp(-self.log_pace)
        cell = self.cells.get(key)
        if cell is None and (greedy := self._greedy(work)) is not None:
            count = min(greedy.num_observations, self.config.max_idle_observations)
            cell = self.cells[key] = Cell(terms_of(work), greedy.log_seconds, count)
        if cell is None:
            computed_s = max(duration - self._attention(work), duration / 4)
            cell = self.cells[key] = Cell(terms_of(work), log(computed_s))
        else:
            self._correct(cell, work, duration, noise)
        cell.num_observations += 1
        if work.requests:
            rows = work.rows / work.requests
            self._max_rows[work.passes] = max(self._max_rows.get(work.passes, 1.0), rows)
        if max(work.requests, work.rows) > self.config.max_exact_count:
            share, terms = 1 / min(cell.num_observations, self.config.max_cell_observations), terms_of(work)
            cell.terms = [old + share * (new - old) for old, new in zip(cell.terms, terms, strict=True)]
        self.num_observations += 1
        cell.last_observation = None if self._num_paces is None else self.num_observations
        self._unfitted_s += seconds
        is_power_of_two = self.num_observations & (self.num_observations - 1) == 0
        # Of few observations each one tells much.
        if self._unfitted_s > self.config.fit_interval_s or (is_power_of_two and self.num_observations > 2):
            self.fit()

    def skip(self, seconds: float) -> None:
        """A step took `seconds`, and is not observed."""
        self.num_observations += 1
        self._unfitted_s += seconds

    def _correct(self, cell: Cell, work: StepWork, duration: float, noise: float) -> None:
        computed_s = exp(cell.log_seconds)
        usual = computed_s + self._attention(work)
        limit = log(self.config.max_time_ratio)
        error = min(max(log(duration / usual), -limit), limit)
        # by how much the logarithm changes with each
        cell_slope, token_slope = computed_s / usual, self._context_tokens(work) / usual
        cells = 1 / min(cell.num_observations, self.config.max_cell_observations) * cell_slope**2
        tokens = self._token_variance * token_slope**2
        paces = 0.0
        if self._num_paces is not None:
            self._num_paces += 1
            paces = 1 / min(self._num_paces, self.config.max_pace_observations)
        total = cells + paces + tokens + noise
        cell.log_seconds += error * cells / cell_slope / total
        self.log_pace += error * paces / total
        if tokens:
            self.token_s = max(self.token_s + error * tokens / token_slope / total, 0.0)
            self._token_variance *= 1 - tokens / total

    def observe_prompts(self, work: StepWork, rows: int, seconds: float) -> None:
        """A step with so many rows of prompts took `seconds`."""
        decode_s = self.seconds(work)
        if decode_s <= 0:
            return
        limit = (decode_s + self.prompts(work, rows)) * self.config.max_time_ratio
        pace = exp(-self.log_pace)
        added = max(min(seconds, limit) - decode_s, 0.0)
        if self.apart:
            self._prompts.observe(rows, max(added - self.more_beside_prompts(work), 0.0) * pace, 0, 0.0)
        else:
            further_s = decode_s - self.seconds(work._replace(rows=work.requests))
            self._prompts.observe(rows, added * pace, work.rows - work.requests, max(further_s, 0.0) * pace)

    def count(self, tokens: float, prompts: bool) -> None:
        """A step is expected to have yielded `tokens`. `prompts`: it had rows of prompts."""
        steps, total, with_prompts = self._recent
        keep = 1 - self.config.prompt_step_weight
        self._recent = keep * steps + 1, keep * total + tokens, keep * with_prompts + prompts

    def serve(self) -> None:
        """The engine begins to serve. What is known so far was measured on an idle machine, whose pace is
        another one."""
        self.fit()
        self._num_paces = 0
        self._token_variance = (self.seconds(StepWork(1, 1, 0)) / self.config.min_context_tokens) ** 2
        for cell in self.cells.values():
            cell.last_observation = None
            cell.num_observations = min(cell.num_observations, self.config.max_idle_observations)

    # ------------------------------------------------------------------------------------------- expectations

    def seconds(self, work: StepWork) -> float:
        """Expected seconds of a step without prompts. They are 0 before the first fit. A sampled step that
        was not measured takes what a greedy one takes."""
        difference, weight = self._difference(work)
        correction = exp(weight * difference + (1 - weight) * self._difference_between(work))
        return (self._formula(terms_of(work)) * correction + self._attention(work)) * exp(self.log_pace)

    def prompts(self, work: StepWork, rows: int) -> float:
        """Seconds that so many rows of prompts are expected to add to such a step."""
        if self._prompts.steps:
            seconds = self._prompts.seconds(rows) * exp(self.log_pace)
            return max(seconds + self.more_beside_prompts(work), 0.0)
        total = self._formula(terms_of(work._replace(rows=work.rows + rows)))
        return (total - self._formula(terms_of(work))) * exp(self.log_pace)

    def with_prompts(self, work: StepWork, tokens: float, plain: float | None = None) -> float:
        """Expected seconds where some steps have rows of prompts.

        They include what a step with prompts takes longer, whatever their rows. They do not include the time
        of each row, which is the same per token at any depth. `tokens`: that such a step yields; prompts
        begin independently of each other, so that more tokens bring more steps with prompts. `plain`: seconds
        of such a step without further rows.
        """
        steps, total, with_prompts = self._recent
        seconds = self.seconds(work)
        if not self._prompts.steps:
            return seconds
        share: float = 1 - max(1 - with_prompts / steps, 0.0) ** (tokens * steps / total)
        more = self._more_beside_prompts(work, seconds, plain)
        more += self._prompts.step_s * exp(self.log_pace)
        return max(seconds + share * more, self.config.min_decode_fraction * seconds)

    def more_beside_prompts(self, work: StepWork) -> float:
        """Seconds that further rows and passes take longer in a step with prompts, whatever the prompts'
        rows."""
        return self._more_beside_prompts(work, self.seconds(work))

    def _more_beside_prompts(self, work: StepWork, seconds: float, plain: float | None = None) -> float:
        further_rows, pace = work.rows - work.requests, exp(self.log_pace)
        if self.apart:
            return work.passes * sum(self.coefficients[-2:]) * pace  # as of one request: see `terms_of`
        if not further_rows or not self._prompts.steps:
            return 0.0
        further_s = seconds - (self.seconds(work._replace(rows=work.requests)) if plain is None else plain)
        return self._prompts.crowded_s(further_rows, max(further_s, 0.0) / pace) * pace

    def _difference(self, work: StepWork) -> tuple[float, float]:
        """→ the logarithm of a cell's time over the formula's, and how far that is known, from 0 to 1."""
        cell = self.cells.get(key_of(work)) or self._greedy(work)
        if cell is None or (usual := self._formula(cell.terms)) <= 0:
            return 0.0, 0.0
        return cell.log_seconds - log(usual), cell.num_observations / (cell.num_observations + 1)

    def _difference_between(self, work: StepWork) -> float:
        """The same by the cells of steps where none and all of the same requests have further rows."""
        requests, rows, passes, sampled, _ = work
        further_rows = requests * (self._max_rows.get(passes, 1.0) - 1)
        if not requests < rows < requests + further_rows:
            return 0.0
        share = (rows - requests) / further_rows
        none, none_weight = self._difference(StepWork(requests, requests, 0, sampled))
        full = StepWork(requests, requests + round(further_rows), passes, sampled)
        all_, all_weight = self._difference(full)
        return (1 - share) * none_weight * none + share * all_weight * all_

    def _context_tokens(self, work: StepWork) -> float:
        """Tokens of context, with what further rows add."""
        if not work.requests:
            return 0.0
        further_rows = work.rows / work.requests - 1
        return work.context * (1 + self.config.further_row_fraction * further_rows)

    def _attention(self, work: StepWork) -> float:
        """Seconds at the usual pace that the context takes."""
        return self.token_s * self._context_tokens(work)

    def _greedy(self, work: StepWork) -> Cell | None:
        return self.cells.get(key_of(work._replace(sampled=False)))

    def age(self, work: StepWork) -> int | None:
        """Steps since a step like it was observed. None: there was none while the engine served."""
        cell = self.cells.get(key_of(work))
        if cell is None or cell.last_observation is None:
            return None
        return self.num_observations - cell.last_observation

    def costs(self) -> StepCosts:
        """The cells and the coefficients in milliseconds, for people."""
        scale = 1000 * exp(self.log_pace)
        steps = [
            StepTime(
                middle(key.requests),
                middle(key.rows),
                middle(key.passes),
                key.sampled,
                round(scale * exp(cell.log_seconds), 4),
                cell.num_observations,
            )
            for key, cell in sorted(self.cells.items())
        ]
        names, values = (*TERM_NAMES, "context_tokens"), (*self.coefficients, self.token_s)
        return StepCosts(steps, {name: scale * value for name, value in zip(names, values, strict=True)})

    # ------------------------------------------------------------------------------------------------ formula

    def _formula(self, terms: list[float]) -> float:
        return float(sum(map(mul, self.coefficients, terms)))

    def fit(self) -> None:
        """Least squares of relative errors over the cells. Each coefficient is at least 0. The method is
        coordinate descent."""
        self._unfitted_s = 0.0
        normal = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        right = [0.0] * NUM_TERMS
        for cell in self.cells.values():
            time = exp(cell.log_seconds)
            weight = min(cell.num_observations, self.config.max_cell_observations) / time**2
            for i, a in enumerate(cell.terms):
                if a:
                    right[i] += weight * a * time
                    row = normal[i]
                    for j, b in enumerate(cell.terms):
                        row[j] += weight * a * b
        coefficients = self.coefficients
        for _ in range(self.config.fit_sweeps):
            for i in range(NUM_TERMS):
                if normal[i][i] > 0:
                    rest = right[i] - sum(normal[i][j] * coefficients[j] for j in range(NUM_TERMS) if j != i)
                    coefficients[i] = max(rest / normal[i][i], 0.0)
