"""Tokens per second of one request on the demo model, with and without drafts: interleaved, medians, the ratio to plain decoding."""

from __future__ import annotations

import argparse
import time
from statistics import median

from common.demo import accept_length, engine, prompts, run
from common.record import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json")
    args = parser.parse_args()
    asked = prompts(args.repeats)
    engines = {drafts: engine(drafts, args.dtype) for drafts in args.drafts}
    for made in engines.values():
        run(made, asked[:1], 16, args.temperature)
    rates: dict[int, list[float]] = {drafts: [] for drafts in args.drafts}
    for repeat, prompt in enumerate(asked):
        order = args.drafts if repeat % 2 == 0 else args.drafts[::-1]
        for drafts in order:
            start = time.perf_counter()
            done = run(engines[drafts], [prompt], args.tokens, args.temperature, seed=repeat)
            rates[drafts].append(done / (time.perf_counter() - start))
    plain, numbers = median(rates[args.drafts[0]]), {}
    for drafts, made in engines.items():
        rate, length = median(rates[drafts]), accept_length(made) if drafts else 1.0
        ratio = rate / plain
        cost = length / ratio
        numbers[drafts] = {"tokens_per_s": round(rate, 1), "ratio": round(ratio, 3), "accept_length": round(length, 3), "M": round(cost, 3)}
        print(f"k = {drafts}: {rate:7.1f} tokens/s, {ratio:.2f} x plain, accept length {length:.2f}, M = {cost:.2f}")
    save(args.json, {"temperature": args.temperature, "dtype": args.dtype, "repeats": args.repeats, "by_drafts": numbers})


if __name__ == "__main__":
    main()
