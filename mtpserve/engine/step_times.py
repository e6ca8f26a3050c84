"""How long the engine's steps take on this machine, learned from the steps that it computes.

Steps that are alike (rows, passes, requests) share a cell with their last durations; the lower quartile is its time, since what disturbs
a step only makes it longer. Between the cells, and where nothing was measured yet, a formula with non-negative coefficients is fitted:

    seconds = c0 + c1 · min(rows, 8) + c2 · rows + c3 · (rows above 16) + c4 · (rows above 64) + c5 · (rows above 256)
                 + c6 · passes + c7 · passes · requests + c8 · tokens of context

The first term is what weights cost to read, the next ones what rows cost to multiply: concave on a CPU, flat and then rising on a GPU. By
what a cell differs from the formula, steps like its own are expected to differ, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import log2, pow
from typing import NamedTuple

from mtpserve.core.request import StepCosts, StepTime

KEPT = 31  # durations of each cell
REFIT = 512  # observations between two fits, and fewer at the beginning
SWEEPS = 40  # of coordinate descent in each
EXACT = 8  # numbers up to this are cells of their own; larger ones share one with those that differ by less than a seventh
BENDS = (16, 64, 256)  # rows from which on more may cost more
NAMES = ("step", "first_rows", "rows", *(f"rows_above_{bend}" for bend in BENDS), "passes", "passes_x_requests", "context_kilotokens")
TERMS = len(NAMES)
PROVISIONAL = 0.1  # weight of what was measured before the engine served
FULL = 1.0  # durations after which a cell counts for half against the formula


class StepWork(NamedTuple):
    """What is in a step."""

    requests: int  # that decode
    rows: int  # of the trunk, those of prompts too
    passes: int  # after the trunk's
    context: int  # tokens of all requests


class CellKey(NamedTuple):
    requests: int
    rows: int
    passes: int


@dataclass(slots=True)
class Cell:
    terms: list[float]  # means of its steps'
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    seen: int = 0
    last: int = 0  # number of the step that was the last
    provisional: bool = False  # from before the engine served, see StepTimes.serve

    @property
    def time(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 4]


def bucket(number: int) -> int:
    return number if number <= EXACT else EXACT + round(5 * log2(number / EXACT))


def middle(bucket: int) -> int:
    """One of the numbers that share it."""
    return bucket if bucket <= EXACT else round(EXACT * 2 ** ((bucket - EXACT) / 5))


def key_of(work: StepWork) -> CellKey:
    return CellKey(bucket(work.requests), bucket(work.rows), work.passes)


def terms_of(work: StepWork) -> list[float]:
    requests, rows, passes, context = work
    convex = (max(rows - bend, 0) for bend in BENDS)
    return [1.0, min(rows, EXACT), rows, *convex, passes, passes * requests, context / 1000]


class StepTimes:
    def __init__(self) -> None:
        self.cells: dict[CellKey, Cell] = {}
        self.coefficients = [0.0] * TERMS
        self.observed = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        terms = terms_of(work)
        cell = self.cells.setdefault(key_of(work), Cell(terms))
        if cell.provisional:
            cell = self.cells[key_of(work)] = Cell(terms)
        cell.seconds.append(seconds)
        cell.seen += 1
        cell.last = self.observed
        share = 1 / min(cell.seen, KEPT)
        cell.terms = [old + share * (new - old) for old, new in zip(cell.terms, terms, strict=True)]
        self.observed += 1
        if self.observed % REFIT == 0 or self.observed in (4, 8, 16, 32, 64, 128, 256):
            self.fit()

    def seconds(self, work: StepWork) -> float:
        """Expected; 0 before anything was fitted."""
        expected = self._formula(terms_of(work))
        cell = self.cells.get(key_of(work))
        if cell is None or (usual := self._formula(cell.terms)) <= 0:
            return expected
        return expected * pow(cell.time / usual, cell.seen / (cell.seen + FULL))

    def serve(self) -> None:
        """What is known so far was measured on an idle machine: the first steps that serve replace it."""
        for cell in self.cells.values():
            cell.provisional = True

    def age(self, work: StepWork) -> int | None:
        """Observations since a step like it; None: there was none that served."""
        cell = self.cells.get(key_of(work))
        return None if cell is None or cell.provisional else self.observed - cell.last

    def costs(self) -> StepCosts:
        """For people."""
        steps = [
            StepTime(middle(key.requests), middle(key.rows), middle(key.passes), 1000 * cell.time, cell.seen)
            for key, cell in sorted(self.cells.items())
        ]
        return StepCosts(steps, {name: 1000 * value for name, value in zip(NAMES, self.coefficients, strict=True)})

    def _formula(self, terms: list[float]) -> float:
        return sum(c * t for c, t in zip(self.coefficients, terms, strict=True))

    def fit(self) -> None:
        """Least squares of relative errors over the cells, each coefficient at least 0, by coordinate descent."""
        normal = [[0.0] * TERMS for _ in range(TERMS)]
        right = [0.0] * TERMS
        for cell in self.cells.values():
            time = cell.time
            weight = min(cell.seen, KEPT) * (PROVISIONAL if cell.provisional else 1) / max(time, 1e-9) ** 2
            for i, a in enumerate(cell.terms):
                if a:
                    right[i] += weight * a * time
                    row = normal[i]
                    for j, b in enumerate(cell.terms):
                        row[j] += weight * a * b
        found = self.coefficients
        for _ in range(SWEEPS):
            for i in range(TERMS):
                if normal[i][i] > 0:
                    rest = right[i] - sum(normal[i][j] * found[j] for j in range(TERMS) if j != i)
                    found[i] = max(rest / normal[i][i], 0.0)
