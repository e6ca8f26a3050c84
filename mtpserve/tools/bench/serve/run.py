"""A run: sends what is asked at its times, and collects what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from mtpserve.tools.bench.dataset.asked import AskedConversation, AskedTurn, Questions
from mtpserve.tools.bench.exported import ServerCounters
from mtpserve.tools.bench.serve.client import Client, History
from mtpserve.tools.bench.serve.measured import Failure, Measured, Sent

WARM_OUTPUT = 32  # most tokens of a warm-up's answer, as in SGLang's client
Done = Callable[[Measured], None]


@dataclass(frozen=True, slots=True)
class Load:
    times: tuple[float, ...]  # when conversations begin, in seconds after the start
    concurrency: int | None = None  # most requests at once; None: no limit
    pause: float = 0.0  # seconds from an answer's end to the conversation's next turn


@dataclass(frozen=True, slots=True)
class RawRun:
    """What was measured. `server`: the difference of its counters over the run alone."""

    requests: tuple[Measured, ...]
    start: float
    server: ServerCounters | None = None
    client_cpu: float = 0.0  # seconds of this process

    @property
    def seconds(self) -> float:
        """The seconds from the start to the last answer's end."""
        return max((request.end for request in self.requests), default=self.start) - self.start


async def send_all(
    client: Client, conversations: Sequence[AskedConversation], load: Load, done: Done
) -> list[Measured]:
    """Returns the measurements in the order of `conversations`. Open loop: each conversation begins at its
    time, whatever became of those before it. Only `concurrency` holds requests back, and that wait is
    measured."""
    clock, start = client.clock, client.clock.now()
    slots: AbstractAsyncContextManager[object] = (
        nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    )
    tasks = []
    for conversation, time_ in zip(conversations, load.times, strict=True):
        await clock.sleep(0)  # those on their way go on, even where the next one is late
        # timers of some event loops are early by up to a millisecond
        while (wait := start + time_ - clock.now()) > 0:
            await clock.sleep(wait)
        talk = talk_through(client, conversation, start + time_, load.pause, slots, done)
        tasks.append(asyncio.create_task(talk))
    return [answer for answers in await asyncio.gather(*tasks) for answer in answers]


async def talk_through(client: Client, conversation: AskedConversation, planned_at: float, pause: float,
                       slots: AbstractAsyncContextManager[object], done: Done) -> list[Measured]:  # fmt: skip
    """Measures one conversation, turn after turn. If a turn fails, those after it cannot be sent, and have
    failed too."""
    answers: list[Measured] = []
    history, clock = History(), client.clock
    for turn in conversation.turns:
        if answers and answers[-1].failure is None:
            planned_at = answers[-1].end + pause
            if pause:
                await clock.sleep(planned_at - clock.now())
        ready = clock.now()
        if answers and answers[-1].failure is not None:
            unsent = Failure("not sent: the turn before it failed")
            answer = Measured(
                Sent(ready, ready, ready),
                ready,
                max_tokens=turn.output,
                category=conversation.category,
                failure=unsent,
            )
        else:
            async with slots:
                answer = await client.ask(turn, history, planned_at, ready, conversation.category)
        if isinstance(turn.prompt, str):
            history = history.and_then(turn.prompt, answer.text)
        answers.append(answer)
        done(answer)
    return answers


async def warm_up(client: Client, conversations: Sequence[AskedConversation]) -> list[Measured]:
    """The first turns, all at once, with short answers."""
    now = client.clock.now()
    turns = [conversation.turns[0] for conversation in conversations]
    short = [
        AskedTurn(turn.prompt, min(turn.output or WARM_OUTPUT, WARM_OUTPUT), turn.tokens) for turn in turns
    ]
    return list(await asyncio.gather(*(client.ask(turn, History(), now, now) for turn in short)))


async def measure(
    client: Client, questions: Questions, load: Load, done: Done, *, flush: bool = False
) -> RawRun:
    """Warm-up, counters, the run, counters."""
    await warm_up(client, questions.warm)
    if flush:
        await client.flush_cache()
    before = await client.counters()
    start, cpu = client.clock.now(), time.process_time()
    requests = await send_all(client, questions.measured, load, done)
    cpu = time.process_time() - cpu
    after = await client.counters() if before is not None else None
    server = (
        after.since(before)
        if after is not None and before is not None and after.server == before.server
        else None
    )
    return RawRun(tuple(requests), start, server, cpu)
