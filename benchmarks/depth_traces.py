"""What steps of each depth took and how many drafts were accepted, step by step: traces for tests/engine/test_depth_traces.py.

python benchmarks/depth_traces.py --requests 4 --out tests/engine/traces/NAME.json

One engine decodes at each depth in turns, so that what slows the machine down for seconds is in all of them. The demo in 36 layers first
(`--model demo`: as it is), then that with an untrained draft layer, as if the text had become one that nobody guesses, then the first one
again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import mean
from time import perf_counter

from common.record import context
from never_slower import DEPTH, Load, engine_of, large, untrained

from mtpserve.config import ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.engine.depth.policy import DepthPolicy
from mtpserve.engine.depth.step_shapes import StepShapes
from mtpserve.engine.depth.watchdog import Watchdog
from mtpserve.engine.engine import Engine
from mtpserve.engine.steps import RequestEvent, ScheduledStep
from mtpserve.spec.sizes import spec_sizes

PARTS = (0, 1, 0)  # the engines
SETTLED = 2  # steps of a turn that are left out: the first ones verify the drafts of the turn before


class Recorded(DepthPolicy):
    """Of the turn that is going on: microseconds of its steps without prompts, and how many of the drafts were accepted."""

    taken: list[int]
    accepted: list[int]
    left_out: int

    def begin(self, depth: int) -> None:
        self.forced_depth, self.taken, self.accepted, self.left_out = depth, [], [], SETTLED

    def stepped(self, step: ScheduledStep, passes: int, seconds: float) -> None:
        _, prompts = StepShapes(self.sizes).plan_work(step.plan, step.reqs)
        if self.left_out > 0:
            self.left_out -= 1
        elif prompts == 0 and passes == self.forced_depth:
            self.taken.append(round(1e6 * seconds))

    def learn(self, events: Seq[RequestEvent]) -> None:
        if self.left_out == 0:
            self.accepted += [len(event.proposal.path) for _, event in events if len(event.proposal.tokens) == self.forced_depth == DEPTH]


def recorded(engine: Engine, requests: int, turns: int, seconds: float) -> dict[str, object]:
    """`turns` of each depth."""
    policy, load = engine.policy, Load(engine, requests, 0.0)
    assert isinstance(policy, Recorded)
    policy.begin(0)
    load.fill()
    taken: list[list[list[int]]] = [[] for _ in range(DEPTH + 1)]
    accepted = ""
    for turn in range(turns):
        for depth in range(DEPTH + 1) if turn % 2 else range(DEPTH, -1, -1):
            policy.begin(depth)
            until = perf_counter() + seconds
            while perf_counter() < until or not policy.taken:
                load.step()
            taken[depth].append(policy.taken)
            accepted += "".join(map(str, policy.accepted))
    load.end()
    return {"microseconds": taken, "accepted": accepted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("large", "demo"), default="large")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--turns", type=int, default=24, help="of each depth and part")
    parser.add_argument("--turn-seconds", type=float, default=0.25)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    spec, engines = SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=DEPTH), list[Engine]()
    with tempfile.TemporaryDirectory() as name:
        model = large(Path(name)) if args.model == "large" else ModelConfig().directory
        for path in (model, untrained(model, Path(name))):
            engines.append(engine_of(path, spec, args.requests))
            engines[-1].watchdog = Watchdog()  # its own requests would be among the steps, and suspend drafting
            engines[-1].policy = Recorded(spec_sizes(spec, SchedulerConfig().step_tokens), DEPTH)
        parts = [recorded(engines[number], args.requests, args.turns, args.turn_seconds) for number in PARTS]
    for part in parts:
        steps, digits = part["microseconds"], [int(digit) for digit in str(part["accepted"])]
        assert isinstance(steps, list)
        times = [f"{mean(x for turn in each for x in turn) / 1000:.2f}" for each in steps]
        print(f"{' '.join(times)} ms by depth, {mean(digits):.2f} of {DEPTH} drafts accepted", file=sys.stderr)
    trace = context() | {"requests": args.requests, "turn_seconds": args.turn_seconds, "parts": parts}
    Path(args.out).write_text(json.dumps(trace, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
