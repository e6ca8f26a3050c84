"""The demo model in an engine, or one that was trained on the same kind of files, and prompts from held-out files."""

from __future__ import annotations

import sys
from pathlib import Path

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.text.tokenizer import tokenizer_of

sys.path.insert(0, str(Path(__file__).parents[1] / "demo_model"))
from corpus import held_out, read

PROMPT = 128


def engine(drafts: int, dtype: str = "auto", model: str = "demo") -> Engine:
    fixed = SpecConfig(speculative_algorithm="MTP", speculative_adaptive=False, speculative_num_steps=drafts)
    return engine_of(fixed if drafts else SpecConfig(speculative_algorithm="none"), dtype, model)


def engine_of(spec: SpecConfig, dtype: str = "auto", model: str = "demo") -> Engine:
    return build_engine(EngineConfig(model=ModelConfig(model=model, dtype=dtype), cache=CacheConfig(max_total_tokens=16384), spec=spec))


def prompts(count: int, model: str = "demo") -> list[list[int]]:
    """The first tokens of `count` held-out files."""
    tokenizer = tokenizer_of(ModelConfig(model=model))
    encoded = (tokenizer.encode(read(path)) for path in held_out())
    prompts = [ids[:PROMPT] for ids in encoded if len(ids) > 2 * PROMPT][:count]
    if len(prompts) < count:
        raise SystemExit(f"only {len(prompts)} held-out files are long enough for a prompt of {PROMPT} tokens")
    return prompts


def run(engine: Engine, asked: list[list[int]], tokens: int, temperature: float, seed: int = 0) -> int:
    """Runs all prompts at once. → tokens generated."""
    for i, prompt in enumerate(asked):
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed + i, ignore_eos=True)
        engine.add(Request(str(i), prompt, params))
    done = 0
    while engine.has_work:
        done += sum(len(event.tokens) for event in engine.step())
    return done


def accept_length(engine: Engine) -> float:
    lengths = engine.stats.accept_lengths
    return sum((n + 1) * count for n, count in enumerate(lengths)) / max(1, sum(lengths))
