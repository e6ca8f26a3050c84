"""`python -m tests.engine.simulate`: 100,000 random requests through the scheduler and its cache, with the invariants checked, and the time
that takes. `--profile` says where."""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from mtpserve.cache.groups import PageGroups
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.engine.pages.kv_connector import KVConnector
from mtpserve.engine.queue import SchedulingPolicy
from mtpserve.spec.curves import CURVES, conditional
from mtpserve.tools.simulate.simulated import SimulatedDevice
from mtpserve.tools.simulate.simulated_tiers import PageTimes, SimulatedDisk, SimulatedTransfers
from mtpserve.tools.simulate.simulator import Simulated, Simulation, percentile
from mtpserve.tools.simulate.traces import TraceConversation, random_trace
from tests.engine.invariants import WatchedScheduler

EOS = -1
STEP = 0.01  # seconds
POLICIES = ("fcfs", "lpm", "priority")


def simulate(
    conversations: Sequence[TraceConversation] | Any, *, pages: int | tuple[int, ...] = 600, windows: tuple[int | None, ...] = (None,),
    page_size: int = 16, seats: int = 32, budget: int = 512, steps: int = 3, overlap: int = 1, policy: str = "fcfs",
    reserved: float = 0.1, long_prompt: int | None = 256, max_long: int = 1, cached: bool = True, every: int = 1, seed: int = 0,
    host: int | None = None, disk: int | None = None, page_time: float = 0.0002,
) -> tuple[Simulated, WatchedScheduler]:  # fmt: skip
    """To the end, with everything checked once in `every` steps. `host`, `disk`: pages below the device; each takes `page_time` to move."""
    counts = (pages,) if isinstance(pages, int) else pages
    groups = PageGroups(windows, counts, page_size, budget)
    sizes = SpecSizes(steps=steps, num_proposed=steps, written=steps)
    device = SimulatedDevice(sizes, conditional(CURVES["glm-5.2-mtp"])[:steps], seed)
    files = None if disk is None else SimulatedDisk(disk)
    kv_connector = None if host is None else KVConnector(groups, [host] * len(counts), files)
    transfers = None if host is None else SimulatedTransfers(PageTimes(page_time, page_time), files)
    scheduler = WatchedScheduler(
        groups, every=every, kv_connector=kv_connector, max_running=seats, token_budget=budget, max_drafts=sizes.nodes, eos_ids=(EOS,),
        service=SchedulingPolicy(policy == "lpm", long_prompt, long_prompt or 1 << 30, max_long, reserved),
    )  # fmt: skip
    made = Simulation(scheduler, groups, device, overlap=overlap, cached=cached, transfers=transfers, watch=scheduler.watch)
    result = made.run(conversations)
    scheduler.check_empty()
    assert result.finished + result.num_left + result.refused == result.requests, "somebody did not end"
    return result, scheduler


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--policy", choices=POLICIES, default="fcfs")
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--host", type=int, help="pages of host memory")
    parser.add_argument("--disk", type=int, help="pages on disk, besides")
    parser.add_argument("--rate", type=float, default=80.0, help="conversations per simulated second")
    parser.add_argument("--reserved", type=float, default=0.0, help="share of what requests may produce that admission leaves free")
    parser.add_argument("--every", type=int, default=100, help="steps between two checks of everything")
    parser.add_argument("--prompt", type=int, default=48, help="mean length")
    parser.add_argument("--output", type=int, default=24, help="mean length")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args(arguments)
    conversations = chosen.requests * 100 // 210  # a conversation has 2.1 requests
    priorities = 3 if chosen.policy == "priority" else 1
    trace = random_trace(
        conversations, chosen.seed, rate=chosen.rate, prompt=chosen.prompt, output=chosen.output, priorities=priorities, stop=EOS
    )
    profile = cProfile.Profile()
    began = perf_counter()
    if chosen.profile:
        profile.enable()
    result, scheduler = simulate(
        trace,
        pages=chosen.pages,
        seats=chosen.seats,
        policy=chosen.policy,
        every=chosen.every,
        reserved=chosen.reserved,
        host=chosen.host,
        disk=chosen.disk,
    )
    profile.disable()
    took = perf_counter() - began
    print(f"{result.requests:,} requests in {result.steps:,} steps: {took:.1f} s; everything checked after {scheduler.checked:,} steps")
    print(f"hit rate {result.hit_rate:.1%} of {result.ideal_hit_rate:.1%}, {result.preemptions:,} preemptions, {result.num_left:,} left, "
          f"{result.refused:,} refused, at most {result.pages_peak} pages; {result.output_tokens / result.seconds:,.0f} tok/s of "
          f"{result.rows / result.steps:.0f} rows a step, first token after {percentile(result.first_token, 0.5):.3f} s "
          f"(p99 {percentile(result.first_token, 0.99):.3f} s)")  # fmt: skip
    if chosen.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
