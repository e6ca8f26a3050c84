"""Milliseconds of a decoding step on a CPU, by model, kernels, requests and drafts: offline, interleaved, medians.

python benchmarks/cpu_step.py --models demo --backends cpu reference --requests 1 16 64 --drafts 0 3

With --transformers also what its `generate` takes per token for one request, with its cache and the checkpoint's number format.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch
from common.demo import accept_length, prompts
from common.record import save
from rich.console import Console
from rich.table import Table

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def engine_of(model: str, backend: str, drafts: int, requests: int, context: int) -> Engine:
    fixed = SpecConfig(speculative_algorithm="MTP", speculative_adaptive=False, speculative_num_steps=drafts)
    spec = fixed if drafts else SpecConfig(speculative_algorithm="none")
    cache = CacheConfig(max_total_tokens=requests * context)
    return build_engine(EngineConfig(model=ModelConfig(model=model, attention_backend=backend), cache=cache, spec=spec))


def steps(engine: Engine, count: int) -> list[float]:
    """Milliseconds of each."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        engine.step()
        taken.append(1e3 * (time.perf_counter() - start))
    return taken


def transformers_ms(model: str, prompt: list[int], tokens: int) -> float:
    """Milliseconds per token of greedy `generate`, the median of three; the prompt's own pass is taken off."""
    from transformers import AutoModelForCausalLM

    directory = ModelConfig(model=model).directory
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    ids = torch.tensor([prompt])

    def seconds(count: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            peer.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return time.perf_counter() - start

    seconds(8)
    return 1e3 * median(seconds(tokens + 1) - seconds(1) for _ in range(3)) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo"], help="directories, or demo")
    parser.add_argument("--backends", nargs="+", default=["cpu", "reference"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--steps", type=int, default=20, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    numbers = {}
    table = Table("model", "requests", "drafts", "kernels", "ms per step", "tokens/s", "accept length")
    for model, requests, drafts in product(args.models, args.requests, args.drafts):
        context = 160 + (args.steps * args.rounds + 8) * (drafts + 1) + 8
        engines = {backend: engine_of(model, backend, drafts, requests, context) for backend in args.backends}
        for engine in engines.values():
            for i, prompt in enumerate((prompts(min(requests, 16)) * requests)[:requests]):
                engine.add(Request(str(i), [token % engine.card.vocab for token in prompt[i % 32 :]], GREEDY))
            while engine.stats.generation_tokens_total < requests:
                engine.step()
            steps(engine, 4)
        taken: dict[str, list[float]] = {backend: [] for backend in engines}
        for _ in range(args.rounds):
            for backend, engine in engines.items():
                taken[backend] += steps(engine, args.steps)
        for backend, engine in engines.items():
            ms, length = median(taken[backend]), accept_length(engine) if drafts else 1.0
            rate = requests * length / ms * 1e3
            name = f"{Path(model).name}, {requests} requests, {drafts} drafts, {backend}"
            numbers[name] = {
                "ms": round(ms, 3),
                "tokens_per_s": round(rate, 1),
                "accept_length": round(length, 2),
                "kernels": engine.card.kernels,
            }
            table.add_row(Path(model).name, str(requests), str(drafts), engine.card.kernels, f"{ms:.2f}", f"{rate:.0f}", f"{length:.2f}")
    for model in args.models if args.transformers else ():
        ms = transformers_ms(model, prompts(1)[0], 64)
        numbers[f"{Path(model).name}, 1 request, transformers"] = {"ms": round(ms, 3), "tokens_per_s": round(1e3 / ms, 1)}
        table.add_row(Path(model).name, "1", "0", "transformers", f"{ms:.2f}", f"{1e3 / ms:.0f}", "1.00")
    Console().print(table)
    save(args.json, {"steps": args.steps * args.rounds, "by_case": numbers})


if __name__ == "__main__":
    main()
