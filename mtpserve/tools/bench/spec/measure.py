"""Measures an engine that decodes with drafts of several shapes, one after the other, in the order of rounds:

    round 1    plain, chain 1, chain 3, tree …        each under all loads
    round 2    … tree, chain 3, chain 1, plain
    round 3    as round 1, and so on: what disturbs the machine for a while does not disturb one shape alone

Prompts are computed before the clock starts, and a window ends before the first request does, so that all its
steps are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from mtpserve.core.errors import ConfigError, RequestFailed
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.spec_sizes import SpecShape
from mtpserve.tools.bench.spec.grid import SpecLoad, Window

if TYPE_CHECKING:
    from mtpserve.engine.engine import Engine
    from mtpserve.runtime.graphs.parts import PartClock

WARM_UP = 4  # tokens of each request, before the first round


@dataclass(frozen=True, slots=True)
class SpecBench:
    """What is measured. `room`: tokens that a request may have beyond `output`, so that none ends inside of
    its window."""

    engine: Engine
    prompts: Sequence[Sequence[int]]
    output: int
    room: int
    seed: int = 0
    parts: PartClock | None = None

    def run(
        self,
        shapes: Sequence[SpecShape],
        loads: Sequence[SpecLoad],
        rounds: int,
        done: Callable[[], None] = lambda: None,
    ) -> dict[tuple[SpecShape, SpecLoad], list[Window]]:
        """A window for each round. `done` is called after each."""
        windows: dict[tuple[SpecShape, SpecLoad], list[Window]] = {
            (shape, load): [] for shape in shapes for load in loads
        }
        for shape in shapes:
            self.engine.draft_with(shape)
            for load in loads:
                self.window(load, 0, WARM_UP)
        for number in range(rounds):
            for shape in shapes if number % 2 == 0 else shapes[::-1]:
                self.engine.draft_with(shape)
                for load in loads:
                    windows[shape, load].append(self.window(load, number, self.output))
                    done()
        return windows

    def window(self, load: SpecLoad, number: int, output: int) -> Window:
        """Measures until a request has `output` tokens. Each round has other requests, the same ones for each
        shape."""
        first = number * load.batch
        prompts = {str(i): list(self.prompts[(first + i) % len(self.prompts)]) for i in range(load.batch)}
        self._ask(prompts, SamplingParams(max_tokens=1, temperature=0, seed=0))
        for _ in self._events():  # their prompts are in the prefix cache then: all of them start together
            pass
        seed = self.seed + first
        self._ask(
            prompts,
            SamplingParams(
                max_tokens=output + self.room, temperature=load.temperature, ignore_eos=True, seed=seed
            ),
        )
        texts: dict[str, list[int]] = {id: [] for id in prompts}
        events = self._events()
        while not all(texts.values()):
            self._take(events, texts)
        tokens, counted = sum(map(len, texts.values())), 0
        times, limit = list[float](), output + max(map(len, texts.values())) - 1
        if self.parts is not None:
            self.parts.reset()
        while not times or max(map(len, texts.values())) < limit:
            began = perf_counter()
            counted += self._take(events, texts)
            times.append(perf_counter() - began)
            if counted != len(times) * load.batch:
                raise ConfigError(
                    f"the KV pool is too small for a batch of {load.batch}: --max-total-tokens must be larger"
                )
        parts = {} if self.parts is None else dict(self.parts.read())
        for id in prompts:
            self.engine.abort(id)
        for _ in self._events():
            pass
        return Window(times, sum(map(len, texts.values())) - tokens, counted, parts, list(texts.values()))

    def _ask(self, prompts: Mapping[str, list[int]], params: SamplingParams) -> None:
        for number, (id, prompt) in enumerate(prompts.items()):
            self.engine.add(Request(id, prompt, replace(params, seed=(params.seed or 0) + number)))

    def _take(self, events: Iterator[list[TokenEvent]], texts: dict[str, list[int]]) -> int:
        """Takes one step's tokens. → how many requests got any."""
        token_events = [event for event in next(events, []) if event.tokens]
        for event in token_events:
            texts[event.id] += event.tokens
        return len(token_events)

    def _events(self) -> Iterator[list[TokenEvent]]:
        """Yields the events of each step. Raises RequestFailed."""
        while self.engine.has_work:
            events = self.engine.step()
            if failed := next((event for event in events if event.error is not None), None):
                raise RequestFailed(failed.error or "a request failed")
            yield events
