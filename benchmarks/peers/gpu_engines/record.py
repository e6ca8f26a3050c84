"""What a result of peers/gpu.py holds: `numbers` of its JSON file is a Record. schema.json is its JSON schema. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass

KIND = "peers_gpu/1"
MTPSERVE = "mtpserve"
ENGINES = (MTPSERVE, "vllm", "loop")


@dataclass(frozen=True, slots=True)
class Arm:
    """An engine with a model and a number of drafts. Its name is `ENGINE:MODEL:DRAFTS`."""

    engine: str
    model: str
    drafts: int

    @property
    def name(self) -> str:
        return f"{self.engine}:{self.model}:{self.drafts}"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm with one batch. `tokens_per_s` is of the whole load, the median of its repeats. The others are of steps whose batch is whole.

    `accept_length`: tokens of a request per step. `context`: tokens of a request in the middle of these steps. `partial_steps`: steps in
    which not all requests got tokens; other than 0 the step's time is not that of the batch. `step_bytes`: what a step must read.
    `bound_ms`: the time of these bytes at the result's read bandwidth.
    """

    engine: str
    model: str
    drafts: int
    batch: int
    tokens_per_s: float
    least_tokens_per_s: float
    most_tokens_per_s: float
    step_ms: float
    steady_tokens_per_s: float
    accept_length: float
    partial_steps: int
    context: float
    step_bytes: float
    bound_ms: float | None = None


@dataclass(frozen=True, slots=True)
class SkippedArm:
    """An arm that was not measured, or not to its end. `reason`: one sentence."""

    engine: str
    model: str
    drafts: int
    reason: str


@dataclass(frozen=True, slots=True)
class Start:
    """`seconds`: from the process's start to its first tokens. `settings`: what the engine chose, in its own words."""

    engine: str
    model: str
    drafts: int
    seconds: float
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """`date`: when it began, ISO 8601 in UTC. `read_bandwidth`: bytes per second, `measured` on the device or `stated`. `toy`: of a dry
    run, whose times say nothing. `prompt`, `output`: tokens of a request of the whole load."""

    kind: str
    date: str
    toy: bool
    read_bandwidth: float
    read_bandwidth_source: str
    prompt: int
    output: int
    accept_curve: list[float]
    rows: list[Row]
    skipped: list[SkippedArm]
    starts: list[Start]
