"""What engines say of themselves when they are asked: the choice of depths, and whether they live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mtpserve.core.stats.engine_stats import DepthState, EngineStats


@dataclass(frozen=True, slots=True)
class StepTime:
    """Steps that are alike, and the median of the last ones. Numbers above 8 are in the middle of those that
    are taken together."""

    requests: int  # that decode
    rows: int  # of the trunk
    passes: int  # after the trunk's
    sampled: bool  # some of the requests were not greedy
    milliseconds: float
    seen: int


@dataclass(frozen=True, slots=True)
class StepCosts:
    steps: list[StepTime] = field(default_factory=list)
    coefficients_ms: dict[str, float] = field(default_factory=dict)  # of the formula between them, by term


@dataclass(frozen=True, slots=True)
class SpecReport:
    """All that is known of the choice of depths: sent when asked for."""

    configured: int  # the deepest depth
    fixed: str | None  # why the depth cannot be changed; None: it can be
    state: DepthState | None  # None where `fixed` says why
    costs: StepCosts
    verified_per_position: list[int]  # proposed tokens, since the start
    accepted_per_position: list[int]
    steps_per_depth: list[int]


@dataclass(frozen=True, slots=True)
class SpecChange:
    """What is None stays as it is."""

    adaptive: bool | None = None
    num_steps: int | None = None
    reset: bool = False  # what was learned of acceptance is forgotten


@dataclass(frozen=True, slots=True)
class EngineState:
    """One of the engines behind a front end."""

    number: int
    state: Literal["starting", "up", "dead"]
    restarts_total: int
    hangs_total: int  # times that it gave no sign of life and was ended
    reason: str  # of its last death; "": it never died
    stats: EngineStats  # those of its processes that have died included
