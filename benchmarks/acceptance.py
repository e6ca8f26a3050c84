"""Acceptance length of the demo model, or of hybrid.py's, on held-out files: T = 0.6, sampled drafts. Exit code 1 below the targets."""

from __future__ import annotations

import argparse

from common.demo import accept_length, engine, prompts, run
from common.record import save

TARGETS = {1: 1.65, 2: 2.1, 3: 2.4}
HYBRID = {1: 1.6, 2: 2.0, 3: 2.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--model", default="demo", help="directory of a checkpoint that hybrid.py has trained")
    parser.add_argument("--json")
    args = parser.parse_args()
    asked, numbers, missed = prompts(args.prompts, args.model), {}, False
    for drafts in args.drafts:
        made = engine(drafts, model=args.model)
        run(made, asked, args.tokens, args.temperature)
        length, stats = accept_length(made), made.stats
        pairs = zip(stats.accepted_tokens_per_position, [stats.drafts_total, *stats.accepted_tokens_per_position], strict=False)
        conditional = [round(kept / max(1, reached), 3) for kept, reached in pairs]
        target = (TARGETS if args.model == "demo" else HYBRID).get(drafts)
        missed |= target is not None and length < target
        numbers[drafts] = {"accept_length": round(length, 3), "conditional": conditional, "verifications": stats.drafts_total}
        print(f"k = {drafts}: accept length {length:.2f} (target {target or '-'}), conditional by position {conditional}", flush=True)
    save(args.json, {"temperature": args.temperature, "prompts": args.prompts, "by_drafts": numbers})
    raise SystemExit(int(missed))


if __name__ == "__main__":
    main()
