"""The shapes of drafts that a measurement compares, and the meaning of its numbers. Arithmetic alone:
measure.py runs them.

AL    tokens of a verification, the target's own included: tokens / verifications
S     tokens per second, relative to plain decoding of the same requests in the same run
M     AL / S: how many steps of plain decoding one step with drafts takes. Without any cost of drafting it
      would be 1, and S = AL
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median

from mtpserve.config.spec import MAX_ROWS
from mtpserve.core.errors import ConfigError
from mtpserve.core.spec_sizes import SpecShape

PLAIN = SpecShape()
PARTS = ("host", "verify", "accept", "draft")
WIN = 1.02  # times plain decoding's speed: less is no reason to draft


@dataclass(frozen=True, slots=True)
class SpecLoad:
    batch: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured while all requests of a load decoded."""

    times: list[float]  # seconds of each step
    tokens: int
    verifications: int  # one for each request and step
    parts: dict[str, float] = field(default_factory=dict)  # seconds; empty where they are not known
    texts: list[list[int]] = field(default_factory=list)  # tokens of each request, from its first on


@dataclass(frozen=True, slots=True)
class SpecFigures:
    """The figures of one shape under one load. Times are medians of all rounds' steps; the acceptance length
    is the mean of all verifications."""

    shape: SpecShape
    load: SpecLoad
    accept_length: float
    step: float  # seconds
    parts: dict[str, float]  # seconds of the step's parts, by PARTS
    tokens_per_second: float  # all requests together: batch · accept_length / step
    speedup: float  # S
    same_text: bool | None  # the greedy texts are plain decoding's; None: sampled, or accepted by lot

    @property
    def overhead(self) -> float:
        """M"""
        return self.accept_length / self.speedup


def shapes(
    steps: Sequence[int], topks: Sequence[int], rows: Sequence[int] | None
) -> tuple[list[SpecShape], list[str]]:
    """→ all that can be, and a line for each combination that cannot. `rows`: drafts + 1 of trees; None:
    steps · topk + 1, as the server has it. Raises ConfigError if nothing remains."""
    draft_shapes, skipped = dict[SpecShape, None](), list[str]()
    for topk, depth in product(topks, steps):
        if topk == 1:
            draft_shapes[SpecShape(depth, 1, depth)] = None
            continue
        pool = SpecShape(depth, topk).pool
        max_drafts = min(pool, MAX_ROWS - 1)
        for count in rows or (min(depth * topk, max_drafts) + 1,):
            if 1 <= count - 1 <= max_drafts:
                draft_shapes[SpecShape(depth, topk, count - 1)] = None
            else:
                why = (
                    f"{pool} nodes"
                    if pool < MAX_ROWS
                    else f"at most {MAX_ROWS - 1} of its {pool} nodes verified"
                )
                skipped.append(
                    f"{depth} steps, topk {topk}, {count} draft tokens: such a tree has {why}, "
                    f"beside the last token"
                )
    if not draft_shapes:
        raise ConfigError(
            f"no combination of --num-steps, --eagle-topk and --num-draft-tokens can be: {skipped[0]}"
        )
    return list(draft_shapes), skipped


def largest(all: Sequence[SpecShape]) -> SpecShape:
    """What an engine is built with that can draft in all of these shapes."""
    return SpecShape(*(max(getattr(shape, name) for shape in all) for name in ("steps", "topk", "nodes")))


def options(shape: SpecShape) -> dict[str, int]:
    return {
        "speculative_num_steps": shape.steps,
        "speculative_eagle_topk": shape.topk,
        "speculative_num_draft_tokens": shape.nodes + 1,
    }


def line(algorithm: str, shape: SpecShape) -> str:
    """Returns the shape as options of a command line."""
    values = {"speculative_algorithm": algorithm} | options(shape)
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())


def figures(
    shape: SpecShape, load: SpecLoad, windows: Sequence[Window], plain: Sequence[Window], lots: bool = False
) -> SpecFigures:
    """`windows`: one for each round, of this shape; `plain` those of plain decoding. `lots`: acceptance is
    synthetic."""
    length, step = accept_length(windows), step_time(windows)
    rate, usual = length / step, accept_length(plain) / step_time(plain)
    has_parts = all(window.parts for window in windows)
    parts = (
        {
            stage: step * median(window.parts.get(stage, 0.0) / sum(window.times) for window in windows)
            for stage in PARTS
        }
        if has_parts
        else {}
    )
    if has_parts:
        parts["host"] = max(step - sum(parts[stage] for stage in PARTS[1:]), 0.0)
    compared = load.temperature == 0 and not lots
    texts = [
        pair
        for one, other in zip(windows, plain, strict=True)
        for pair in zip(one.texts, other.texts, strict=True)
    ]
    same = all(agree(ours, theirs) for ours, theirs in texts) if compared else None
    return SpecFigures(shape, load, length, step, parts, load.batch * rate, rate / usual, same)


def accept_length(windows: Sequence[Window]) -> float:
    return sum(window.tokens for window in windows) / sum(window.verifications for window in windows)


def step_time(windows: Sequence[Window]) -> float:
    return median(seconds for window in windows for seconds in window.times)


def agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """True if the shorter text is the beginning of the longer one: faster decoding has more tokens."""
    count = min(len(one), len(other))
    return list(one[:count]) == list(other[:count])


def best(all: Sequence[SpecFigures], load: SpecLoad) -> SpecFigures | None:
    """The fastest under this load; None: nothing is faster than plain decoding. If several are equally fast,
    the one with fewer nodes."""
    under = [cell for cell in all if cell.load == load and cell.speedup >= WIN]
    return max(under, key=lambda cell: (cell.speedup, -cell.shape.nodes), default=None)


def as_row(cell: SpecFigures) -> dict[str, object]:
    return {
        "num_steps": cell.shape.steps,
        "eagle_topk": cell.shape.topk,
        "num_draft_tokens": cell.shape.nodes + 1,
        "batch_size": cell.load.batch,
        "temperature": cell.load.temperature,
        "accept_length": round(cell.accept_length, 4),
        "step_ms": round(1000 * cell.step, 4),
        "parts_ms": {stage: round(1000 * seconds, 4) for stage, seconds in cell.parts.items()} or None,
        "tokens_per_second": round(cell.tokens_per_second, 2),
        "speedup": round(cell.speedup, 4),
        "overhead": round(cell.overhead, 4),
        "same_text": cell.same_text,
    }
