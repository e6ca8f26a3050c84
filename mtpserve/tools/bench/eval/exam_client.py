"""A server with OpenAI's API that answers an exam, asked from a few threads with nothing but Python's own
HTTP client."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from mtpserve.core.errors import ConfigError, RequestFailed
from mtpserve.spec.plain import ListedSteps
from mtpserve.tools.bench.eval.tasks import Exam, ExamQuestion

TIMEOUT = 600.0  # seconds for one request
# no proxies, as for the other benchmarks
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
T = TypeVar("T")
R = TypeVar("R")


class EchoedLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    text_offset: list[int]


class AnsweredMessage(msgspec.Struct):
    content: str | None = None


class AnsweredChoice(msgspec.Struct):
    text: str = ""
    logprobs: EchoedLogprobs | None = None
    message: AnsweredMessage | None = None


class Answered(msgspec.Struct):
    choices: list[AnsweredChoice]


class ExamModels(msgspec.Struct):
    data: list[ListedSteps]


@dataclass(frozen=True, slots=True)
class ExamServer:
    """`body`: what every request has besides its own fields. With `chat` a prompt is a user's message."""

    base_url: str  # without /v1
    model: str
    key: str | None = None
    chat: bool = False
    at_once: int = 16
    body: Mapping[str, Any] = field(default_factory=dict)

    def scores(self, questions: Sequence[ExamQuestion]) -> list[list[float]]:
        if self.chat:
            raise ConfigError(
                "--chat: chat completions do not score a given text; multiple choice needs completions"
            )
        pairs = [(question.prompt, option) for question in questions for option in question.options]
        scored = iter(self._all(self._score, pairs))
        return [[next(scored) for _ in question.options] for question in questions]

    def texts(self, questions: Sequence[ExamQuestion], exam: Exam) -> list[str]:
        def text(question: ExamQuestion) -> str:
            payload = {"temperature": 0, "max_tokens": exam.max_tokens, "stop": list(exam.stop)}
            if self.chat:
                message = self._post(
                    "/v1/chat/completions",
                    payload | {"messages": [{"role": "user", "content": question.prompt}]},
                ).message
                return (message.content or "") if message is not None else ""
            return self._post("/v1/completions", payload | {"prompt": question.prompt}).text

        return self._all(text, questions)

    def listed(self) -> list[ListedSteps]:
        return decode_body(self._send("/v1/models", None), ExamModels, "/v1/models").data

    def _score(self, pair: tuple[str, str]) -> float:
        """The sum over the tokens that begin in the option."""
        prompt, option = pair
        payload = {"prompt": prompt + option, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        logprobs = self._post("/v1/completions", payload).logprobs
        if logprobs is None:
            raise RequestFailed(
                f"{self.base_url}: no log-probabilities of the prompt: echo with logprobs is not "
                f"supported there"
            )
        tokens = zip(logprobs.text_offset, logprobs.token_logprobs, strict=True)
        inside = [
            score
            for offset, score in tokens
            if len(prompt) <= offset < len(prompt + option) and score is not None
        ]
        if not inside:
            raise RequestFailed(f"{self.base_url}: none of the prompt's tokens begins with {option!r}")
        return sum(inside)

    def _post(self, path: str, payload: dict[str, Any]) -> AnsweredChoice:
        answered = decode_body(
            self._send(path, {"model": self.model, **payload, **self.body}), Answered, path
        )
        if not answered.choices:
            raise RequestFailed(f"{self.base_url}{path}: an answer without choices")
        return answered.choices[0]

    def _all(self, ask: Callable[[T], R], items: Sequence[T]) -> list[R]:
        with ThreadPoolExecutor(self.at_once) as pool:
            futures = [pool.submit(ask, one) for one in items]
            try:
                return [future.result() for future in futures]
            finally:  # after an error the others are not worth waiting for
                pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, path: str, body: dict[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.key}"} if self.key else {}
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url + path, data, headers)
            with OPENER.open(request, timeout=TIMEOUT) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            text = error.read()[:300].decode(errors="replace")
            raise RequestFailed(f"{self.base_url}{path}: HTTP {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise RequestFailed(f"{self.base_url}{path}: {getattr(error, 'reason', error)}") from error


def decode_body(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise RequestFailed(f"{path}: not the answer of a server with OpenAI's API: {error}") from error
