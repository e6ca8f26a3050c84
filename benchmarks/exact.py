"""Exact mode on the demo model in bfloat16: greedy text with every kind of drafts is that of plain decoding, and what that costs.

256 held-out prompts are run in groups of 1, 5 and 32, chosen at random for every kind. Exit code 1 if a token differs.
The same prompts without exact mode show how often tokens differ then, and how much faster that is.
"""

from __future__ import annotations

import argparse
import random
import time

from common.demo import prompts
from common.record import save

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine

GROUPS = (1, 5, 32)


def specs(exact: bool) -> dict[str, SpecConfig]:
    def tree(steps: int, topk: int, rows: int) -> SpecConfig:
        return SpecConfig(speculative_algorithm="MTP", speculative_adaptive=False, speculative_num_steps=steps, speculative_eagle_topk=topk,
                          speculative_num_draft_tokens=rows, speculative_exact=exact)  # fmt: skip

    chains = {
        f"k = {k}": SpecConfig(speculative_algorithm="MTP", speculative_adaptive=False, speculative_num_steps=k, speculative_exact=exact)
        for k in (1, 3, 7)
    }
    plain = SpecConfig(speculative_algorithm="none", speculative_exact=exact)
    return {"plain": plain} | chains | {"tree 2, 2 deep, 4": tree(2, 2, 5), "tree 2, 3 deep, 6": tree(3, 2, 7)}


def texts(spec: SpecConfig, asked: list[list[int]], tokens: int, dice: random.Random) -> tuple[list[list[int]], float]:
    """→ the tokens of each prompt, tokens per second."""
    config = EngineConfig(model=ModelConfig(dtype="bfloat16"), cache=CacheConfig(max_total_tokens=16384), spec=spec)
    engine = build_engine(config)
    outputs: list[list[int]] = [[] for _ in asked]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    order = dice.sample(range(len(asked)), len(asked))
    start = time.perf_counter()
    while order:
        size = dice.choice(GROUPS)
        group, order = order[:size], order[size:]
        for i in group:
            engine.add(Request(str(i), asked[i], params))
        while engine.has_work:
            for event in engine.step():
                outputs[int(event.id)] += event.tokens
    return outputs, sum(map(len, outputs)) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--kinds", nargs="+", choices=list(specs(True)), default=list(specs(True)), help="the first is what others are held to"
    )
    parser.add_argument("--skip-cost", action="store_true", help="leave out the runs without exact mode")
    parser.add_argument("--json")
    args = parser.parse_args()
    held_out = prompts(min(args.prompts, 24))
    size = args.prompt_tokens
    # Several places of each held-out file's beginning.
    asked = [ids[start : start + size] for start in range(0, 128 - size + 1, 8) for ids in held_out][: args.prompts]
    if len(asked) < args.prompts:
        raise SystemExit(f"only {len(asked)} prompts of {size} tokens")
    numbers: dict[str, dict[str, float]] = {}
    wrong = 0
    for exact in (True,) if args.skip_cost else (True, False):
        plain: list[list[int]] = []
        for name, spec in specs(exact).items():
            if name not in args.kinds or (not exact and name not in ("plain", "k = 3")):
                continue
            outputs, speed = texts(spec, asked, args.tokens, random.Random(name))
            plain = plain or outputs
            differing = sum(a != b for one, other in zip(plain, outputs, strict=True) for a, b in zip(one, other, strict=True))
            others = sum(one != other for one, other in zip(plain, outputs, strict=True))
            wrong += differing if exact else 0
            label = f"{'exact' if exact else 'not exact'}, {name}"
            numbers[label] = {"tokens_per_second": round(speed, 1), "differing_tokens": differing, "differing_prompts": others}
            print(f"{label}: {differing} differing tokens in {others} prompts, {speed:.0f} tokens/s", flush=True)
    save(args.json, {"prompts": len(asked), "tokens": args.tokens, "dtype": "bfloat16", "by_kind": numbers})
    raise SystemExit(int(wrong > 0))


if __name__ == "__main__":
    main()
