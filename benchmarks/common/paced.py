"""An engine without a model that gives every request its tokens at a steady rhythm, to measure what surrounds an engine.

`python -m common.paced`, with this directory's parent in PYTHONPATH, serves it on a free port as `mtpserve launch` would; the rhythm is
the environment's.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mtpserve
from mtpserve.config import EngineConfig, ModelConfig, ServerConfig
from mtpserve.core.request import Finish, FirstTokenTimes, ModelCard, Proposal, Request, TokenEvent, TokenLogprob
from mtpserve.core.sampling import GrammarSpec
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.parallel.ticks import Ticks
from mtpserve.server.launch import serve
from mtpserve.text.tokenizer import Tokenizer

DEMO = Path(mtpserve.__file__).parent / "demo"
TEXT = Path(__file__)  # what every answer says, again and again: ASCII, so that every step completes some text
STEP_S, STEP_TOKENS = "PACED_STEP_S", "PACED_STEP_TOKENS"


def spoken() -> list[int]:
    """The tokens of TEXT."""
    return Tokenizer(DEMO).encode(TEXT.read_text(), special=False)


@dataclass(slots=True)
class Progress:
    request: Request
    done: int = 0


class PacedEngine:
    """engine.process.EngineLike. A step begins `seconds` after the last one began, or at once if that is past, and gives every request
    `tokens` tokens: the last one, and before it the drafts that were accepted."""

    def __init__(self, seconds: float, tokens: int) -> None:
        self.seconds, self.tokens, self.text = seconds, tokens, spoken()
        self.card = ModelCard("paced", max(self.text) + 1, 1 << 20, (), tokens - 1)
        self.stats = EngineStats(
            draft_tokens_per_position=[0] * (tokens - 1), accepted_tokens_per_position=[0] * (tokens - 1), accept_lengths=[0] * tokens
        )
        self.live: dict[str, Progress] = {}
        self.ticks = Ticks()
        self._next = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def changes_idle(self) -> bool:
        return False

    def compile(self, spec: GrammarSpec | None) -> None: ...

    def add(self, request: Request, compiled: bool = False) -> None:
        self.live[request.id] = Progress(request)
        self.stats.running = len(self.live)

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.stats.running = len(self.live)

    def check_integrity(self) -> None: ...

    def check_alive(self) -> None: ...

    def step(self) -> list[TokenEvent]:
        time.sleep(max(0.0, self._next - time.perf_counter()))
        self._next = max(self._next, time.perf_counter() - self.seconds) + self.seconds
        self.stats.steps_total += 1
        return [self._event(progress) for progress in list(self.live.values())]

    def _event(self, progress: Progress) -> TokenEvent:
        request, done, text = progress.request, progress.done, self.text
        left = (request.sampling.max_tokens or 16) - done
        tokens = [text[(done + i) % len(text)] for i in range(min(self.tokens, left))]
        progress.done += len(tokens)
        finish = Finish.LENGTH if len(tokens) == left else None
        if finish is not None:
            self.abort(request.id)
        accepted, top = len(tokens) - 1, request.sampling.logprobs
        proposal = (
            Proposal(tokens[:-1], list(range(accepted)), ["mtp"] * accepted, list(range(1, accepted + 1))) if accepted else Proposal()
        )
        scores = None if top is None else [TokenLogprob(-0.5, 1, [(token, -0.5), (3, -2.0)][:top]) for token in tokens]
        return TokenEvent(request.id, tokens, accepted, proposal, finish, None, scores, None, FirstTokenTimes(0, 0) if done == 0 else None)


def build(config: EngineConfig, *, progress: bool) -> PacedEngine:
    return PacedEngine(float(os.environ[STEP_S]), int(os.environ[STEP_TOKENS]))


if __name__ == "__main__":
    engine = EngineConfig(model=ModelConfig(model=str(DEMO)))
    sys.exit(serve(engine, ServerConfig(port=0, log_level="warning"), factory="common.paced:build"))
