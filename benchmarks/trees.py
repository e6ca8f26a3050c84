"""Acceptance length of trees against chains on the demo model's held-out files, per number of verified nodes. Exit code 1 if at some
depth no tree accepts more than the chain."""

from __future__ import annotations

import argparse

from common.demo import accept_length, engine_of, prompts, run
from common.record import save

from mtpserve.config import SpecConfig

DEPTHS = (1, 3, 5, 7)
TREES = ((2, 2), (4, 2), (4, 4), (8, 4))  # topk, nodes per level of depth


def shapes() -> dict[str, SpecConfig]:
    specs = {}
    for depth in DEPTHS:
        specs[f"chain {depth}"] = SpecConfig(speculative_algorithm="MTP", speculative_adaptive=False, speculative_num_steps=depth)
        for topk, each in TREES:
            # The most nodes that the pool of such a tree can have.
            nodes = min(each * depth, 55, topk + (depth - 1) * topk * topk)
            spec = SpecConfig(
                speculative_algorithm="MTP",
                speculative_adaptive=False,
                speculative_num_steps=depth,
                speculative_eagle_topk=topk,
                speculative_num_draft_tokens=nodes + 1,
            )
            specs.setdefault(f"tree {depth} deep, topk {topk}, {nodes} nodes", spec)
    return specs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--json")
    args = parser.parse_args()
    asked, numbers, beaten = prompts(args.prompts), {}, True
    for temperature in args.temperatures:
        best: dict[int, dict[str, float]] = {}
        for name, spec in shapes().items():
            made = engine_of(spec)
            run(made, asked, args.tokens, temperature)
            length = accept_length(made)
            numbers[f"T = {temperature}, {name}"] = {"nodes": spec.nodes, "accept_length": round(length, 3)}
            best.setdefault(spec.steps, {})[name] = length
            print(f"T = {temperature}  {name:32} {length:.3f} tokens per verification", flush=True)
        for depth, lengths in best.items():
            chain = lengths.pop(f"chain {depth}")
            beaten &= max(lengths.values()) > chain
    save(args.json, {"prompts": args.prompts, "tokens": args.tokens, "by_shape": numbers})
    raise SystemExit(int(not beaten))


if __name__ == "__main__":
    main()
