"""What steps take with few and many requests, at each depth, measured at start. So the first choices of a
depth are no guesses."""

from __future__ import annotations

from time import perf_counter

from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.depth.control import EngineControl
from mtpserve.engine.depth.policy import DepthPolicy
from mtpserve.engine.depth.step_times import StepTimes


def ladder(max_requests: int) -> list[int]:
    """1, 2, 4, … and `max_requests`."""
    return [*(1 << i for i in range((max_requests - 1).bit_length())), max_requests]


def measure(engine: EngineControl, policy: DepthPolicy, max_requests: int) -> None:
    """`max_requests` requests at once."""
    config = policy.config
    depth_s = config.measuring_s / len(ladder(max_requests)) / len(policy.depths)
    # An engine's first steps are slower: of 1 ms some took 1.4. They are forgotten.
    measure_depths(engine, policy, 1, perf_counter() + depth_s, depth_s)
    policy.model.times = StepTimes(policy.times.apart, config)
    until = perf_counter() + config.measuring_s
    for requests in ladder(max_requests):
        measure_depths(engine, policy, requests, until, depth_s)
    policy.forced_depth = None
    policy.forget()
    policy.times.serve()


def measure_depths(
    engine: EngineControl, policy: DepthPolicy, requests: int, until: float, depth_s: float
) -> None:
    """So many requests at once, at each depth, for two steps and `depth_s` seconds at least.

    `until`: a time of perf_counter, after which nothing more is measured.
    """
    config = policy.config
    tokens = min(config.measuring_tokens, engine.context_length - 1)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, seed=0)
    for depth in reversed(policy.depths):
        policy.forced_depth, steps, start = depth, 0, perf_counter()
        for number in range(requests):
            prompt = [number * engine.card.vocab // requests]  # for different experts
            engine.add(Request(f"measure {number}", prompt, sampling))
        while engine.has_work and (now := perf_counter()) < until:
            # The first step of a depth is not measured.
            enough = steps >= config.measured_steps or (steps > 1 and now > start + depth_s)
            if enough and now > start + config.settling_s + config.learning_interval_s:
                break
            engine.step()
            steps += 1
        for number in range(requests):
            engine.abort(f"measure {number}")
        while engine.has_work:
            engine.step()
