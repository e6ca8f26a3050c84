"""The way from a response's bytes to tokens and times: server-sent events of /v1/completions and
/v1/chat/completions, or one JSON object.

Does not read from the network: bytes come with the time at which they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mtpserve.tools.bench.exported import RequestUsage, VLLMRequestMetrics
from mtpserve.tools.bench.serve.measured import (
    BY_CHUNK,
    BY_LENGTH,
    BY_TOKENIZER,
    BY_USAGE,
    Arrival,
    Failure,
    OwnFigures,
    shares,
)

CountTokens = Callable[[str], int]


class StreamedDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class StreamedChoice(msgspec.Struct):
    text: str | None = None
    delta: StreamedDelta | None = None
    message: StreamedDelta | None = None
    finish_reason: str | None = None

    @property
    def output_text(self) -> str:
        """What counts as output, whatever part of the answer it belongs to."""
        message = self.delta or self.message
        if message is None:
            return self.text or ""
        calls = bytes(message.tool_calls)
        return (message.reasoning_content or message.reasoning or "") + (message.content or "") + (
            "" if calls in (b"", b"null", b"[]") else calls.decode(errors="replace"))  # fmt: skip

    @property
    def content(self) -> str:
        """What the conversation goes on with."""
        message = self.delta or self.message
        return (self.text if message is None else message.content) or ""


class StreamedEvent(msgspec.Struct):
    choices: list[StreamedChoice] = []
    usage: RequestUsage | None = None
    metrics: VLLMRequestMetrics | None = None
    error: msgspec.Raw = msgspec.Raw()


DECODER = msgspec.json.Decoder(StreamedEvent)


class AnswerReader:
    """One answer while it arrives. `count` counts a text's tokens, where a tokenizer is at hand."""

    def __init__(self, streamed: bool, count: CountTokens | None = None) -> None:
        self.failure: Failure | None = None
        self.finish: str | None = None
        self.usage: RequestUsage | None = None
        self.metrics: VLLMRequestMetrics | None = None
        self._streamed, self._count = streamed, count
        self._rest = bytearray()
        self._chunks: list[tuple[float, str, int | None]] = []  # time, text, tokens so far
        self._content: list[str] = []
        self._ended = False

    def feed(self, data: bytes, now: float) -> None:
        self._rest += data
        if not self._streamed:
            return
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._event(bytes(line[5:]).strip(), now)

    def close(self, now: float) -> None:
        """The response has ended. One without its end is a failure: what came is not the answer."""
        if self._streamed:
            if self._rest.startswith(b"data:"):
                self._event(bytes(self._rest[5:]).strip(), now)
            if self.failure is None and not self._ended and self.finish is None:
                self.failure = Failure("ended in the middle of the answer")
        else:
            self._event(bytes(self._rest), now)
        if self.failure is None and not self._chunks and not (self.usage and self.usage.completion_tokens):
            self.failure = Failure("no tokens in the answer")

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            event = DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self.failure = self.failure or Failure(
                "not OpenAI's format", f"{error}: {data[:100].decode(errors='replace')}"
            )
            return
        if bytes(event.error) not in (b"", b"null"):
            self.failure = self.failure or Failure("error in the answer", message_of(bytes(data)))
            return
        text = "".join(choice.output_text for choice in event.choices)
        self._content += [choice.content for choice in event.choices]
        self.usage, self.metrics = event.usage or self.usage, event.metrics or self.metrics
        so_far = event.usage.completion_tokens if event.usage is not None and event.choices else None
        if text or (so_far is not None and so_far > self._so_far):
            self._chunks.append((now, text, so_far))
        for choice in event.choices:
            self.finish = choice.finish_reason or self.finish

    @property
    def _so_far(self) -> int:
        return (self._chunks[-1][2] or 0) if self._chunks else 0

    @property
    def text(self) -> str:
        return "".join(self._content)

    @property
    def figures(self) -> OwnFigures | None:
        usage_figures = self.usage.figures if self.usage is not None else None
        if usage_figures is not None:
            return OwnFigures(usage_figures.steps, usage_figures.proposed, usage_figures.accepted)
        theirs = self.metrics.figures if self.metrics is not None else None
        return None if theirs is None else OwnFigures(theirs.steps + 1, theirs.proposed, theirs.accepted)

    @property
    def cached(self) -> int | None:
        return None if self.usage is None or self.usage.details is None else self.usage.details.cached_tokens

    def tokens(self) -> tuple[tuple[Arrival, ...], str]:
        """The arrivals of tokens, and how their tokens were counted. Tokens that only the end's usage knows
        of (one that ends the text is not shown) came with the last chunk."""
        total = self.usage.completion_tokens if self.usage is not None else None
        if not self._chunks:
            return (), BY_USAGE
        counts, by = self._counts(total)
        return tuple(
            Arrival(time, count) for (time, _, _), count in zip(self._chunks, counts, strict=True) if count
        ), by

    def _counts(self, total: int | None) -> tuple[Sequence[int], str]:
        so_far = [tokens for _, _, tokens in self._chunks if tokens is not None]
        if not self._streamed and total:
            return [total], BY_USAGE
        if len(so_far) == len(self._chunks):
            last = max(so_far[-1], total or 0)
            ends = [*so_far[:-1], last]
            return [max(0, end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)], BY_USAGE
        texts = [text for _, text, _ in self._chunks]
        if self._count is not None:
            counts = [self._count(text) for text in texts]
            return (shares(total, counts) if total else [max(1, count) for count in counts]), BY_TOKENIZER
        if total:
            return shares(total, [len(text) for text in texts]), BY_LENGTH
        return [1] * len(texts), BY_CHUNK


def message_of(body: bytes) -> str:
    """An error's text, from any of the forms that servers give it."""
    try:
        value = msgspec.json.decode(body)
        for name in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except msgspec.MsgspecError:
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]
