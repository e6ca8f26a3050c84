"""`python -m tests.engine.beside_prompts`: depths that are chosen against plain decoding on the simulated H100, second by second from a
start on, where prompts are several times as long as answers and little of what is drafted is accepted. Steps are captured, or launched.

Answers end at random, and with drafts earlier: until some time one of the two has computed more prompts, so that rows of prompts are work,
too: each counts as what it takes in a full step, in tokens of plain decoding.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Sequence as Seq
from contextlib import suppress
from itertools import product
from random import Random
from statistics import mean

from mtpserve.engine.steps import ScheduledStep
from mtpserve.tools.simulate.costs import StepCost
from mtpserve.tools.simulate.simulator import Simulation
from mtpserve.tools.simulate.traces import TraceConversation, TraceTurn
from tests.engine.captured import CAPTURED, Apart, Captured
from tests.engine.test_policy import DEEP, costs, run

SHORTEST, LONGEST = 32, 96  # tokens of an answer


class Over(Exception):
    """The time is."""


def work(
    cost: StepCost, batch: int, prompt: int, rate: float | None, times: Seq[float], seed: int, kind: type[Simulation] = Simulation
) -> list[float]:  # fmt: skip
    """Tokens' worth of work until each of the times, in seconds. `rate`: of acceptance of each draft; None: plain decoding. `kind`:
    whether steps are captured."""
    random, done, prompts = Random(seed), list[tuple[float, float]](), 0
    worth = cost.row * batch / cost.seconds(batch, 0, 0)

    def see(simulation: Simulation, planned: ScheduledStep) -> None:
        nonlocal prompts
        done.append((simulation.now, simulation.result.output_tokens + worth * prompts))
        prompts += sum(span.num_tokens for span in planned.plan.spans if span.num_tokens > 1)
        if simulation.now > times[-1]:
            raise Over

    answers = (random.randrange(SHORTEST, LONGEST) for _ in range(int(batch * 6 * (times[-1] + 1))))
    load = [TraceConversation(0.0, [TraceTurn([1] * prompt, [1] * tokens)]) for tokens in answers]
    with suppress(Over):
        depth, captured = 0 if rate is None else DEEP, CAPTURED if issubclass(kind, Captured) else ()
        run(load, batch, cost, depth, [rate or 0.0] * DEEP, rate is not None, None, see, kind, captured, kind is Apart)
        raise AssertionError("too few requests")
    return [until(done, time) for time in times]


def until(done: Seq[tuple[float, float]], time: float) -> float:
    """What was done by then, between the steps before and after it. `done`: times and work, of each step's begin."""
    after = bisect_left(done, (time, 0.0))
    (begin, less), (end, more) = done[after - 1], done[after]
    return less + (more - less) * (time - begin) / (end - begin)


def ratios(batch: int, prompt: int, rate: float, times: Seq[float], seeds: int, kind: type[Simulation] = Simulation) -> list[float]:
    """To plain decoding's work until each of the times: means over loads."""
    plain_cost, cost = costs("h100")
    drafted = [work(cost, batch, prompt, rate, times, seed, kind) for seed in range(seeds)]
    plain = [work(plain_cost, batch, prompt, None, times, seed, kind) for seed in range(seeds)]
    return [mean(one[i] / other[i] for one, other in zip(drafted, plain, strict=True)) for i in range(len(times))]


def main(arguments: Seq[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128], help="at once")
    parser.add_argument("--prompt", type=int, nargs="+", default=[128, 256], help=f"tokens; answers have {SHORTEST} to {LONGEST}")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="share of drafts that is accepted")
    parser.add_argument("--seconds", type=float, nargs="+", default=[1, 2, 3, 5, 10, 30])
    parser.add_argument("--seeds", type=int, default=3, help="loads, of which means are printed")
    kinds: dict[str, type[Simulation]] = {"captured": Captured, "apart": Apart, "launched": Simulation}
    parser.add_argument(
        "--steps", choices=kinds, default="captured", help="apart: prompts have passes of their own; launched: no step is captured"
    )
    chosen = parser.parse_args(arguments)
    times = sorted(chosen.seconds)
    print("requests  prompt  accepted " + "".join(f"{time:>7g} s" for time in times))
    for batch, prompt, rate in product(chosen.requests, chosen.prompt, chosen.rate):
        found = ratios(batch, prompt, rate, times, chosen.seeds, kinds[chosen.steps])
        print(f"{batch:8}  {prompt:6}  {rate:8.0%} " + "".join(f"{ratio:9.3f}" for ratio in found), flush=True)


if __name__ == "__main__":
    main()
