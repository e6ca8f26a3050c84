"""What steps take with few and many requests, deep and not, measured at start: the first choices of a depth
are no guesses then."""

from __future__ import annotations

from time import perf_counter

from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.depth.control import EngineControl
from mtpserve.engine.depth.policy import SETTLING, DepthPolicy
from mtpserve.engine.depth.step_times import StepTimes

# in all; and of each request. More requests, whose steps are longer, are not measured when the time is over
SECONDS, TOKENS = 6.0, 64
WARM_UP = 0.2  # seconds of steps before them
# of each number of requests and depth, and of slow ones; the first is not measured
STEPS, FEWEST, ENOUGH_S = 6, 2, 0.3
# seconds of steps that are measured of each, at most: these are many steps where they are short, and vary
# more
MEASURED = 0.015
PRIME = 7919  # tokens that are this far apart: different ones go to different experts


def ladder(max_requests: int) -> list[int]:
    """1, 2, 4, … and `max_requests`."""
    return [*(1 << i for i in range((max_requests - 1).bit_length())), max_requests]


def measure(engine: EngineControl, policy: DepthPolicy, max_requests: int) -> None:
    """`max_requests` requests at once."""
    measure_depths(engine, policy, 1, perf_counter() + WARM_UP)
    # An engine's first steps are slower: of 1 ms some took 1.4.
    policy.times, until = StepTimes(policy.times.apart), perf_counter() + SECONDS
    for requests in ladder(max_requests):
        measure_depths(engine, policy, requests, until)
    policy.forced = None
    policy.forget()
    policy.times.serve()


def measure_depths(engine: EngineControl, policy: DepthPolicy, requests: int, until: float) -> None:
    """So many requests at once, at each depth. `until`: a time of perf_counter, after which nothing more is
    measured."""
    tokens = min(TOKENS, engine.context_length - 1)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, seed=0)
    for depth in reversed(policy.depths):
        policy.forced, steps, began = depth, 0, perf_counter()
        for number in range(requests):
            engine.add(Request(f"measure {number}", [(number + 1) * PRIME % engine.card.vocab], sampling))
        while engine.has_work and (now := perf_counter()) < until:
            enough = steps >= STEPS or (steps >= FEWEST and now > began + ENOUGH_S)
            if enough and now > began + SETTLING + MEASURED:
                break
            engine.step()
            steps += 1
        for number in range(requests):
            engine.abort(f"measure {number}")
        while engine.has_work:
            engine.step()
