"""Offline inference for asyncio: `AsyncLLM(...)` runs the engine in a process of its own, or several engines,
and yields each request's completion while it grows. It has no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

from mtpserve.core.errors import InvalidRequest, RequestFailed, ShuttingDown
from mtpserve.core.protocols.control import (
    MEMORY_TAGS,
    ContinueGeneration,
    PauseGeneration,
    PauseMode,
    Sleep,
    WakeUp,
)
from mtpserve.core.request import Finish
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.process.engines import engines_of, meetings_of
from mtpserve.engine.process.process import DEFAULT_FACTORY
from mtpserve.engine.process.replicas import Replicas
from mtpserve.llm import engine_config, sampling_of
from mtpserve.text.messages import Message, chat_prompts
from mtpserve.text.outputs import Completion, OfflineRequest
from mtpserve.text.requests import Prompt, request_from
from mtpserve.text.tokenizer import tokenizer_of
from mtpserve.weights.checkpoint.hub import fetched


class AsyncLLM:
    """Options are those of `LLM`, and those of several engines: `AsyncLLM("demo", data_parallel_size=2)`. The
    engines start with `async with`, with `start()` or with the first request. All calls belong to one event
    loop.

    Raises ConfigError and LoadError. Requests raise InvalidRequest, EngineBusy where the queue is full, and
    EngineDead.
    """

    def __init__(self, model: str = "demo", *, factory: str = DEFAULT_FACTORY, **options: Any) -> None:
        """`factory` names the function that builds an engine."""
        self.config = fetched(engine_config({"model": model, **options}))
        self.tokenizer = tokenizer_of(self.config.model)
        self._factory, self._ids = factory, itertools.count()
        self._starts, self._ended = asyncio.Lock(), False
        self._client: Replicas | None = None
        self._meetings: TemporaryDirectory[str] | None = None
        self._live: set[str] = set()  # request ids
        self._aborted: set[str] = set()  # live requests that `abort` has ended

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the engines are ready. May be repeated."""
        await self._engines()

    async def shutdown(self) -> None:
        """Ends the engines, and every stream that is still open. Later calls raise ShuttingDown; this one may
        be repeated."""
        self._ended = True
        async with self._starts:
            if self._client is not None:
                await self._client.stop()
            if self._meetings is not None:
                self._meetings.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    async def _engines(self) -> Replicas:
        async with self._starts:
            if self._ended:
                raise ShuttingDown("the engines have ended: AsyncLLM.shutdown was called")
            if self._client is None:
                self._meetings = meetings_of(self.config)
                client = engines_of(
                    self.config,
                    self._meetings,
                    self._factory,
                    progress=sys.stderr.isatty(),
                    log_level="warning",
                )
                try:
                    await client.start()
                except BaseException:
                    await client.stop(grace=0)
                    raise
                self._client = client
            return self._client

    # -- requests --------------------------------------------------------------------------------------------

    def sampling(self, **values: Any) -> SamplingParams:
        """The model's recommended sampling parameters, overridden by `values`."""
        return SamplingParams(**(self.tokenizer.defaults | values))

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Yields what the request has so far, after each step: the last completion has `finish_reason`. A
        prompt is a text or token ids; `sampling_params` is vLLM's name of `sampling`. Closing the iterator
        ends the request.

        Without `sampling`, the model's recommended parameters, up to the context length. Raises
        InvalidRequest, also for the id of a request that still runs, and RequestFailed.
        """
        id = f"async-{next(self._ids)}" if request_id is None else request_id
        if id in self._live:
            raise InvalidRequest(f"request_id {id!r} is that of a request that still runs", "request_id")
        params = sampling_of(sampling, sampling_params) or self.sampling()
        self._live.add(id)
        try:
            client = await self._engines()
            request = await asyncio.to_thread(request_from, self.tokenizer, prompt, params, id)
            output = OfflineRequest.of(self.tokenizer, request, client.card)
            try:
                if id in self._aborted:
                    raise RequestFailed("the request was aborted")
                async with aclosing(client.submit(request)) as stream:
                    async for events in stream:
                        last = output.read(events)
                        if last.finish is Finish.ERROR:
                            raise RequestFailed(last.error or "the request failed")
                        yield output.completion()
                        if last.finish is not None:
                            return
            except RequestFailed:
                if id not in self._aborted:
                    raise
                output.abort()
                yield output.completion()
        finally:
            self._live.discard(id)
            self._aborted.discard(id)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """`generate` for one conversation: the arguments are those of `LLM.chat`."""
        (prompt,) = chat_prompts(
            self.tokenizer,
            [messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        async with aclosing(
            self.generate(prompt, sampling, request_id, sampling_params=sampling_params)
        ) as stream:
            async for completion in stream:
                yield completion

    async def abort(self, request_id: str) -> None:
        """Ends a request: its last completion has what it got, and the `finish_reason` abort. Ids that are
        not running are ignored."""
        if request_id in self._live:
            self._aborted.add(request_id)
            if self._client is not None:
                self._client.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        """Later prompts find nothing that was computed before."""
        (await self._engines()).reset_prefix_cache()

    # -- operators -------------------------------------------------------------------------------------------

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Pauses between two steps. abort: requests end with what they have; retract: they give their pages
        back and are computed anew later; in_place: they keep their pages. New requests wait."""
        client = await self._engines()
        if mode == "abort":
            for id in [*self._live]:
                await self.abort(id)
        await client.control(PauseGeneration(mode))

    async def resume_generation(self) -> None:
        """Continues after a pause, with the requests that wait."""
        await (await self._engines()).control(ContinueGeneration())

    async def sleep(self, level: int = 1, mode: Literal["abort", "keep"] = "abort") -> None:
        """Gives memory back: the KV cache is dropped. Level 1 moves the weights of a GPU to host memory;
        level 2 drops weights. abort: requests end with what they have; keep: they are computed anew later.
        Raises InvalidRequest."""
        if level not in (1, 2):
            raise InvalidRequest(f"level must be 1 or 2, got {level!r}", "level")
        client = await self._engines()
        if mode == "abort":
            for id in [*self._live]:
                await self.abort(id)
        await client.control(Sleep(list(MEMORY_TAGS), drops_weights=level == 2))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory of some tags, weights and kv_cache, or of all again. Weights that were dropped are
        loaded as at the start. Raises InvalidRequest."""
        await (await self._engines()).control(WakeUp(None if tags is None else list(tags)))

    async def is_sleeping(self) -> bool:
        return (await self._engines()).stats().sleeping > 0

    async def is_paused(self) -> bool:
        return (await self._engines()).stats().paused > 0
