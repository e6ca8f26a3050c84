"""The loads that peers/gpu.py measures, on any engine: one loop drives all of them, by token ids. Standard library alone.

throughput  all requests arrive at once and end after the same number of tokens: output tokens per second, prompts included
steady      all requests run in each step: after all requests have begun and some warm steps, the time and the tokens of further steps
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from common.shapes import StepBytes
from peers.gpu_engines.record import Arm, Row
from peers.gpu_engines.shapes import Config, kv_bytes

# Tokens per step with 1, 2, 3 drafts: GLM-5.2's MTP layer, as in mtpserve/spec/curves.py. Engines accept drafts by lot with these
# probabilities, so that speed does not depend on what random weights guess.
ACCEPT_CURVE = (1.84, 2.50, 2.99)
SLACK = 16  # positions that an engine may reserve beyond a request's last token


class Engine(Protocol):
    """`step` returns the number of new tokens by request. Requests are greedy and do not end before `max_tokens`."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None: ...

    def step(self) -> dict[str, int]: ...

    @property
    def has_unfinished_requests(self) -> bool: ...

    def abort_all(self) -> None: ...

    def settings(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """`prompt`, `output`: tokens of a request of the whole load. `warm`, `timed`: steps of the steady load."""

    batches: tuple[int, ...]
    prompt: int = 128
    output: int = 128
    repeats: int = 3
    warm: int = 12
    timed: int = 48

    @property
    def max_batch(self) -> int:
        return max(self.batches)

    def steady_tokens(self, batch: int, drafts: int) -> int:
        """More than a request gets while it is measured; prompts of large batches enter over several steps."""
        return (drafts + 1) * (2 * self.warm + self.timed + 8 + batch // 8)

    def context_length(self, drafts: int) -> int:
        """Tokens of the longest request."""
        return self.prompt + max(self.output, self.steady_tokens(self.max_batch, drafts)) + SLACK

    def kv_bytes(self, config: Config, drafts: int) -> int:
        """Of all requests of the largest batch at their longest, and a twentieth more for pages that are not full."""
        tokens = self.max_batch * self.context_length(drafts)
        return int(1.05 * tokens * kv_bytes(config, drafts))


def acceptance_rates(drafts: int) -> list[float]:
    """Probability that the draft at each position is accepted, whatever becomes of those before it."""
    lengths = (1.0, *ACCEPT_CURVE[:drafts])
    return [length - shorter for shorter, length in pairwise(lengths)]


def prompts(batch: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, vocab_size) for _ in range(length)] for _ in range(batch)]


@dataclass(frozen=True, slots=True)
class SteadyFigures:
    """Of the timed steps. The fields are those of Row."""

    step_ms: float
    steady_tokens_per_s: float
    accept_length: float
    partial_steps: int
    context: float


@dataclass(frozen=True, slots=True)
class Load:
    engine: Engine
    config: Config
    sizes: Sizes
    drafts: int

    def add(self, batch: int, max_tokens: int, seed: int) -> None:
        for i, prompt in enumerate(prompts(batch, self.sizes.prompt, self.config["vocab_size"], seed)):
            self.engine.add(f"{seed}-{batch}-{i}", prompt, max_tokens)

    def throughput(self, batch: int, output: int, seed: int) -> float:
        """Output tokens per second. Raises RuntimeError where an engine gives another number of tokens."""
        start = time.perf_counter()
        self.add(batch, output, seed)
        tokens = 0
        while self.engine.has_unfinished_requests:
            tokens += sum(self.engine.step().values())
        seconds = time.perf_counter() - start
        if tokens != batch * output:
            raise RuntimeError(f"{batch} requests of {output} tokens gave {tokens} tokens")
        return tokens / seconds

    def steady(self, batch: int, seed: int) -> SteadyFigures:
        self.add(batch, self.sizes.steady_tokens(batch, self.drafts), seed)
        active_ids, warm_tokens, steps = set[str](), 0, 0
        while len(active_ids) < batch or steps < self.sizes.warm:
            steps += len(active_ids) == batch
            counts = self.engine.step()
            active_ids |= counts.keys()
            warm_tokens += sum(counts.values())
        tokens, steps, partial_steps, start = 0, 0, 0, time.perf_counter()
        while steps < self.sizes.timed:
            if counts := self.engine.step():  # an engine that runs ahead has steps without tokens
                steps, tokens, partial_steps = steps + 1, tokens + sum(counts.values()), partial_steps + (len(counts) < batch)
        seconds = time.perf_counter() - start
        self.engine.abort_all()
        context = self.sizes.prompt + (warm_tokens + tokens / 2) / batch
        return SteadyFigures(1e3 * seconds / steps, tokens / seconds, tokens / steps / batch, partial_steps, context)

    def rows(self, arm: Arm) -> Iterator[Row]:
        """One for each batch, without `bound_ms`."""
        for batch in self.sizes.batches:
            self.throughput(batch, min(16, self.sizes.output), seed=1)  # warm-up
            rates = [self.throughput(batch, self.sizes.output, seed=2 + i) for i in range(self.sizes.repeats)]
            gc.collect()
            figures = self.steady(batch, seed=99)
            step_bytes = StepBytes(self.config).step(batch, round(figures.context), self.drafts)
            yield Row(
                arm.engine, arm.model, arm.drafts, batch, median(rates), min(rates), max(rates), **asdict(figures), step_bytes=step_bytes
            )
