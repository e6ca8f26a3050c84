"""What rounding costs: the mean log-probability that a model gives to held-out text, by number format. One pass, nothing generated.

python benchmarks/quality.py --model demo --quantization none int8
"""

from __future__ import annotations

import argparse

from common.demo import prompts
from common.record import save

from mtpserve import LLM, SamplingParams


def score(model: str, dtype: str, quantization: str, texts: list[list[int]]) -> tuple[float, float]:
    """→ mean log-probability of a token, and the share of tokens that are the likeliest."""
    with LLM(model=model, dtype=dtype, quantization=quantization, speculative_algorithm="none") as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        scored = [entry for done in llm.generate(texts, params) for entry in done.prompt_logprobs or [] if entry is not None]
    return sum(entry.logprob for entry in scored) / len(scored), sum(entry.rank == 1 for entry in scored) / len(scored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a directory with the demo's vocabulary, or demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--json")
    args = parser.parse_args()
    texts, numbers = prompts(args.texts), {}
    for quantization in args.quantization:
        logprob, first = score(args.model, args.dtype, quantization, texts)
        numbers[quantization] = {"logprob": round(logprob, 5), "likeliest": round(first, 4)}
        print(f"{quantization:6} mean log-probability {logprob:.5f}, {first:.2%} of the tokens are the likeliest")
    save(args.json, {"model": args.model, "tokens": sum(len(text) - 1 for text in texts), "by_format": numbers})


if __name__ == "__main__":
    main()
