"""Requests over HTTP, by aiohttp: one request and what became of it, the server's counters, and what is asked
before and after a run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from mtpserve.core.errors import ConfigError, MTPServeError
from mtpserve.tools.bench.dataset.asked import AskedTurn, Prompt
from mtpserve.tools.bench.exported import ServerCounters, read_counters
from mtpserve.tools.bench.serve.measured import Failure, Measured, Sent
from mtpserve.tools.bench.serve.stream import AnswerReader, CountTokens, message_of

if TYPE_CHECKING:
    import aiohttp

INSTALL = "it is not installed: pip install 'mtpserve[bench]'"
TIMEOUT = 6 * 3600.0  # seconds for one request, as the peers' clients
USAGE = {"include_usage": True, "continuous_usage_stats": True}
STABLE, TRIES = 0.1, 20  # seconds between two looks at the counters, until they no longer change


class BenchError(MTPServeError):
    """The server cannot be measured at all."""


class Clock:
    """Monotonic, in seconds; tests bring one that does not wait."""

    now = staticmethod(time.perf_counter)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is asked. `body`: what every request has besides prompt and length."""

    base_url: str  # without /v1
    endpoint: str
    chat: bool
    model: str | None = None  # None: the first that the server lists
    stream: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    id_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class History:
    """A conversation so far: its prompts and the server's own answers."""

    exchanges: tuple[tuple[str, str], ...] = ()

    def and_then(self, prompt: str, answer: str) -> History:
        return History((*self.exchanges, (prompt, answer)))


class Client:
    """Used as an asynchronous context; `tokens` counts a text's tokens where a tokenizer is at hand."""

    def __init__(self, target: Target, tokens: CountTokens | None = None, clock: Clock | None = None) -> None:
        self.target, self.clock = target, clock or Clock()
        self._tokens = tokens
        self._session: aiohttp.ClientSession | None = None
        self._usage: Mapping[str, bool] | None = USAGE
        self._sent = 0

    async def __aenter__(self) -> Client:
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError(f"mtpserve bench serve needs aiohttp, and {INSTALL}") from error
        # Servers close idle connections after five seconds or more; one that is closed while a request is on
        # its way is a failure.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3, ssl=not self.target.insecure)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=dict(self.target.headers),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    def body(self, turn: AskedTurn, history: History, model: str) -> dict[str, Any]:
        payload: dict[str, Any] = {"model": model, "stream": self.target.stream}
        if turn.output is not None:
            payload["max_tokens"] = turn.output
        if self.target.stream and self._usage is not None:
            payload["stream_options"] = dict(self._usage)
        return payload | prompt_of(turn.prompt, history, self.target.chat) | dict(self.target.body)

    async def ask(
        self, turn: AskedTurn, history: History, planned_at: float, ready: float, category: str = ""
    ) -> Measured:
        """Sends one request and reads its answer. Never raises for what a server or the network does: that is
        a Failure."""
        reader, answer = AnswerReader(self.target.stream, self._tokens), (0, b"")
        at = self.clock.now()
        for _ in range(3):
            data = msgspec.json.encode(self.body(turn, history, self.target.model or ""))
            reader, usage, at = AnswerReader(self.target.stream, self._tokens), self._usage, self.clock.now()
            try:
                answer = await self._exchange(data, reader)
            except TimeoutError:
                reader.failure = Failure("timed out", f"after {TIMEOUT:g} s")
            except Exception as error:  # whatever it is, it is this request's: the others go on
                reader.failure = reader.failure or Failure(reason_of(error), str(error)[:200])
            if not self._refused_usage(answer, usage):
                break
        end = self.clock.now()
        if answer[0] and answer[0] != 200:
            reader.failure = Failure(f"HTTP {answer[0]}", message_of(answer[1]))
        elif reader.failure is None:
            reader.close(end)
        return measured(turn, reader, Sent(planned_at, ready, at), end, self.target.stream, category)

    async def _exchange(self, data: bytes, reader: AnswerReader) -> tuple[int, bytes]:
        """The status, and the body of a refusal."""
        assert self._session is not None
        headers = {"Content-Type": "application/json"}
        if self.target.id_prefix is not None:
            headers["x-request-id"] = f"{self.target.id_prefix}{self._sent}"
        self._sent += 1
        async with self._session.post(
            self.target.base_url + self.target.endpoint, data=data, headers=headers
        ) as response:
            if response.status != 200:
                return response.status, await response.read()
            async for chunk in response.content.iter_any():
                reader.feed(chunk, self.clock.now())
        return 200, b""

    def _refused_usage(self, answer: tuple[int, bytes], stream_options: Mapping[str, bool] | None) -> bool:
        """True if the server refused an option that it does not know. The option is left out from then on,
        and the request is sent again."""
        status, body = answer
        if status not in (400, 422) or stream_options is None or not self.target.stream:
            return False
        if stream_options == USAGE and (b"continuous_usage_stats" in body or b"stream_options" in body):
            self._usage = {"include_usage": True}
            return True
        if b"stream_options" in body or b"include_usage" in body:
            self._usage = None
            return True
        return False

    async def get(self, path: str) -> tuple[int, bytes]:
        assert self._session is not None
        async with self._session.get(self.target.base_url + path) as response:
            return response.status, await response.read()

    async def wait_until_ready(self, seconds: float) -> None:
        """Waits until /v1/models answers. Raises BenchError after `seconds`."""
        import aiohttp

        end = self.clock.now() + seconds
        while True:
            try:
                status, body = await self.get("/v1/models")
                if status in (401, 403):
                    raise BenchError(
                        f"{self.target.base_url} refuses: {message_of(body)}; --api-key KEY, or "
                        f"OPENAI_API_KEY"
                    )
                if status < 500:
                    return
                why = f"HTTP {status}: {message_of(body)}"
            except (aiohttp.ClientError, OSError) as error:
                why = (
                    os.strerror(error.errno)
                    if isinstance(error, OSError) and error.errno
                    else str(error) or type(error).__name__
                )
            if self.clock.now() >= end:
                raise BenchError(
                    f"no server is ready at {self.target.base_url}: {why} (--ready-check-timeout-sec)"
                )
            await self.clock.sleep(min(1.0, max(0.05, end - self.clock.now())))

    async def models(self) -> Sequence[ListedModel]:
        """Returns the server's models; None if the server cannot say."""
        import aiohttp

        try:
            status, body = await self.get("/v1/models")
            return msgspec.json.decode(body, type=ModelListing).data if status == 200 else ()
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
            return ()

    async def counters(self) -> ServerCounters | None:
        """Returns the counters once they no longer change: an engine tells its front end a moment later what
        it has counted. None: there are none."""
        import aiohttp

        last: ServerCounters | None = None
        for _ in range(TRIES):
            try:
                status, body = await self.get("/metrics")
            except (aiohttp.ClientError, OSError):
                return None
            now = read_counters(body.decode(errors="replace")) if status == 200 else None
            if now is None or now == last:
                return now
            last = now
            await self.clock.sleep(STABLE)
        return last

    async def flush_cache(self) -> None:
        """SGLang's route or vLLM's; ours has both. Raises BenchError where there is none, or where it
        refuses."""
        import aiohttp

        assert self._session is not None
        for path in ("/flush_cache", "/reset_prefix_cache"):
            try:
                async with self._session.post(self.target.base_url + path) as response:
                    status, body = response.status, await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise BenchError(f"--flush-cache: {path}: {error}") from error
            if status == 200:
                return
            if status not in (404, 405):
                raise BenchError(f"--flush-cache: {path} answers HTTP {status}: {message_of(body)}")
        raise BenchError("--flush-cache: the server has neither /flush_cache nor /reset_prefix_cache")


class ListedModel(msgspec.Struct):
    id: str
    root: str | None = None


class ModelListing(msgspec.Struct):
    data: list[ListedModel]


def prompt_of(prompt: Prompt, history: History, chat: bool) -> dict[str, Any]:
    if not isinstance(prompt, str):
        return {"prompt": list(prompt)}
    if not chat:
        return {"prompt": "".join(text for turn in history.exchanges for text in turn) + prompt}
    messages = [message for question, answer in history.exchanges for message in (
        {"role": "user", "content": question}, {"role": "assistant", "content": answer})]  # fmt: skip
    return {"messages": [*messages, {"role": "user", "content": prompt}]}


def reason_of(error: Exception) -> str:
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError):
        return "cannot connect"
    if isinstance(
        error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError
    ):
        return "disconnected"
    return type(error).__name__


def measured(
    turn: AskedTurn, reader: AnswerReader, sent: Sent, end: float, streamed: bool, category: str
) -> Measured:
    arrivals, by = reader.tokens()
    usage = reader.usage
    counted = sum(arrival.tokens for arrival in arrivals)
    return Measured(
        sent,
        end,
        streamed,
        arrivals,
        prompt_tokens=usage.prompt_tokens if usage is not None else turn.tokens,
        output_tokens=max(counted, (usage.completion_tokens or 0) if usage is not None else 0),
        cached_tokens=reader.cached,
        counted_by=by,
        meant=turn.tokens if usage is not None else None,
        max_tokens=turn.output,
        finish=reader.finish,
        category=category,
        figures=reader.figures,
        failure=reader.failure,
        text=reader.text,
    )
