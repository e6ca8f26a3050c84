"""One of several engines: its process, how far its requests have got, and what it is told when it is started
again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

from mtpserve.core.errors import EngineDead
from mtpserve.core.protocols.control import (
    MEMORY_TAGS,
    Calls,
    ContinueGeneration,
    PauseGeneration,
    Reply,
    SetWeightVersion,
    Sleep,
    StageCheckpoint,
    UpdateWeights,
    WakeUp,
)
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.process.client import ProcessClient
from mtpserve.engine.process.totals import total


@dataclass(slots=True)
class Replica:
    """One engine process at a time, and what is known of those before it."""

    number: int
    client: ProcessClient
    state: Literal["starting", "up", "dead"] = "starting"
    restarts: int = 0
    deaths: int = 0  # consecutive deaths
    hangs: int = 0
    since: float = 0.0  # when it came up
    # what its processes that have died had counted
    stats_before_restart: EngineStats = field(default_factory=EngineStats)
    reason: str = ""  # why it last died
    open: set[str] = field(default_factory=set)  # ids of its requests

    @property
    def is_full(self) -> bool:
        capacity = self.client.card.capacity
        return capacity is not None and len(self.open) >= capacity

    def stats(self) -> EngineStats:
        before = self.stats_before_restart
        return total([before, self.client.stats()]) if self.state == "up" else before


@dataclass(slots=True)
class Progress:
    """How far a request has got, so that another engine can go on with it: see core.request.Request."""

    output_ids: list[int]
    num_scored_prompt_tokens: int

    def take(self, events: Seq[TokenEvent]) -> None:
        for event in events:
            self.output_ids += event.tokens
            self.num_scored_prompt_tokens += len(event.prompt_logprobs or ())

    def migrate(self, request: Request) -> Request:
        """Returns the request for the next engine, which continues after the last token."""
        return replace(
            request,
            prior_output_ids=list(self.output_ids),
            num_scored_prompt_tokens=self.num_scored_prompt_tokens,
            is_migrated=True,
        )


@dataclass(slots=True)
class WeightHistory:
    """The updates since the engines' start. An engine that is started again has its first weights, and gets
    the same ones."""

    # from directories, each with its names' prefix and its number of parameters
    calls: list[tuple[str, UpdateWeights, int]] = field(default_factory=list)
    weight_version: str | None = None
    is_lost: bool = False  # there were weights that no directory has

    def add(self, call: UpdateWeights, reply: Reply) -> None:
        stage, number = call.stage, int(reply.values["parameters"])
        self.weight_version = call.weight_version or self.weight_version
        if not isinstance(stage, StageCheckpoint):
            self.is_lost = self.is_lost or number > 0
            return
        # A larger one before it has tensors that this one has not.
        self.calls = [entry for entry in self.calls if entry[0] != stage.prefix or entry[2] > number]
        self.calls.append((stage.prefix, call, number))

    async def restore(self, client: ProcessClient) -> None:
        """Raises EngineDead where that cannot be."""
        if self.is_lost:
            raise EngineDead("its weights were updated while it served, and no directory has them")
        for _, call, _ in self.calls:
            if error := (await client.control(call)).error:
                raise EngineDead(f"its weights cannot be updated again: {error}")
        if self.weight_version is not None:
            await client.control(SetWeightVersion(self.weight_version))


class StandingCalls:
    """The pause and the sleep that are in force."""

    def __init__(self) -> None:
        self._pause: PauseGeneration | None = None
        self._asleep: dict[str, bool] = {}  # by tag: whether its contents were dropped

    def note(self, call: Calls) -> bool:
        """All engines that are up have done it. Returns whether they have their first weights again."""
        match call:
            case PauseGeneration():
                self._pause = call
            case ContinueGeneration():
                self._pause = None
            case Sleep(tags, drops_weights):
                self._asleep |= {tag: drops_weights for tag in tags if tag not in self._asleep}
            case WakeUp(tags):
                dropped = [self._asleep.pop(tag, False) for tag in tags or MEMORY_TAGS]
                return any(dropped)
        return False

    @property
    def calls(self) -> list[Calls]:
        sleeps = [Sleep([tag], dropped) for tag, dropped in self._asleep.items()]
        return [*sleeps, *([] if self._pause is None else [self._pause])]

    async def restore(self, client: ProcessClient) -> None:
        """Has an engine that was started again do the same. Raises EngineDead, or what Reply.check raises."""
        for call in self.calls:
            (await client.control(call)).check()
