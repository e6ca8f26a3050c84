"""The engine process's way to `build.py`: what can be known sooner is looked at before, and what only shows
in a step, after.

Importing torch takes seconds: a checkpoint that its headers give away is refused before that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import TYPE_CHECKING

from mtpserve.config import EngineConfig
from mtpserve.core.errors import LoadError
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.depth.first_times import ladder, measure
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf import read_config

if TYPE_CHECKING:
    from mtpserve.engine.engine import Engine

log = logging.getLogger(__name__)


def build_engine(config: EngineConfig, *, progress: bool = False) -> Engine:
    """Raises LoadError and ConfigError."""
    read_config(config.model.directory)
    if config.model.load_format != "dummy":
        Checkpoint.open(config.model.directory)
    from mtpserve.engine.startup.build import build_engine as build
    from mtpserve.engine.startup.compute import compiles

    engine = build(config, progress=progress)
    try_out(engine, compiles(config))
    engine.ticks.finish()
    return engine


def try_out(engine: Engine, compiles: bool = False) -> None:
    """Computes a few tokens, of which nothing remains. Raises LoadError where that fails: weights that are
    finite, each by itself, may be damaged all the same, and kernels may not run here.

    `compiles`: kernels are compiled when they first meet a size. Then prompt chunks of all sizes and batches
    of all sizes are computed, in powers of two, so that the first real ones wait for no compiler.
    """
    # No page of a trial is kept anywhere, and none is found: each prompt is computed whole.
    fingerprint, engine.fingerprint = engine.fingerprint, None
    run_prompts(engine, [1])
    if compiles:
        began = perf_counter()
        longest = min(engine.token_budget, engine.context_length - 1)
        for length in ladder(longest):
            run_prompts(engine, [length], launched=True)
        for requests in ladder(engine.max_running):
            run_prompts(engine, [1] * requests, launched=True)
        seconds = perf_counter() - began
        log.debug(
            "warm-up took %.1f s: prompts of up to %d tokens, batches of up to %d requests",
            seconds,
            longest,
            engine.max_running,
        )
    if engine.policy is not None:
        measure(engine, engine.policy, engine.max_running)
    engine.watchdog.start(engine)
    engine.fingerprint = fingerprint
    engine.forget_trials()


def run_prompts(engine: Engine, lengths: Seq[int], launched: bool = False) -> None:
    """Prompts of these lengths, at once. `launched`: also where decoding is captured, which a rule for the
    output prevents."""
    for number, length in enumerate(lengths):
        tokens = min(4, engine.context_length - length)
        # It has a seed: none is drawn, so that --random-seed gives the first request what it gives without a
        # trial.
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, seed=0)
        # Words of several tokens are a rule that is not captured (runtime/sampling/rules).
        words = [[0] * (tokens + 1)] if launched else []
        engine.add(Request(f"try out {number}", [0] * length, sampling, words))
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise LoadError(
                    f"the model cannot compute a token, its weights may be damaged: {event.error}"
                )
