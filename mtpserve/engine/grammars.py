"""Grammars compiled before they are needed: when a request arrives, beside the steps. The runner takes them
when it seats the request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import cast

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.grammars import Grammar, GrammarCompiler
from mtpserve.core.sampling import GrammarSpec

MOST = 1024  # compiled and not taken: of requests that wait, or went away before they were seated


class PreparedGrammars:
    """core.protocols.GrammarCompiler: each state is given once, since what a text does to it cannot be
    undone. `coming` is told of each grammar before it is compiled."""

    def __init__(
        self, compiler: GrammarCompiler, coming: Callable[[GrammarSpec], None] = lambda spec: None
    ) -> None:
        self._compiler, self._coming = compiler, coming
        self._ready: deque[tuple[GrammarSpec, Grammar]] = deque(maxlen=MOST)
        self._lock = Lock()

    def prepare(self, spec: GrammarSpec) -> None:
        """May take seconds, in any thread. Raises InvalidRequest, EngineBusy."""
        self._coming(spec)
        grammar = self._compiler.compile(spec)
        with self._lock:
            self._ready.append((spec, grammar))

    def compile(self, spec: GrammarSpec) -> Grammar:
        """An unused state: one that was prepared, or a new one, for a request that was preempted."""
        with self._lock:
            for index, (ready_spec, grammar) in enumerate(self._ready):
                if ready_spec == spec:
                    del self._ready[index]
                    return grammar
        return self._compiler.compile(spec)


class NoGrammars:
    """Refuses all grammars: the engine has no tokenizer."""

    def prepare(self, spec: GrammarSpec) -> None:
        raise InvalidRequest(
            f"{spec.kind} needs a tokenizer, and this engine was started without one", spec.kind
        )


class LazyGrammars:
    """core.protocols.GrammarCompiler, made when the first request has a grammar: most engines never see
    one."""

    def __init__(self, tokenizer: Path, vocab: int, eos_ids: tuple[int, ...]) -> None:
        self.arguments = tokenizer, vocab, eos_ids
        self.compiler: GrammarCompiler | None = None

    def compile(self, spec: GrammarSpec) -> Grammar:
        if self.compiler is None:
            self.compiler = cast(
                GrammarCompiler,
                import_module("mtpserve.text.grammars.grammar").LLGuidanceCompiler(*self.arguments),
            )
        return self.compiler.compile(spec)
