"""What the chip can do at best: bytes and products per second, and what a launch costs that does nothing."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from gpu_kit.timing import Alarm, call_us, capture, event_us, host_us

LAUNCHES, NODES = 1000, 660
PROGRAMS, BLOCKS, BLOCK = 8192, 32, 4096  # of read_kernel, its blocks and their numbers
HOPS = 2048  # of chase_kernel
CALLS = 3  # in a graph, of what takes milliseconds


@triton.jit
def empty_kernel(p_x):
    pass


@triton.jit
def chained_kernel(p_x):
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def read_kernel(p_x, p_out, PER: tl.constexpr, B: tl.constexpr):
    """A program reads PER blocks of B numbers that follow one another, and writes one sum: a stream that is only read."""
    first = tl.program_id(0).to(tl.int64) * PER * B
    b_sum = tl.zeros([B], tl.float32)
    for i in range(PER):
        b_sum += tl.load(p_x + first + i * B + tl.arange(0, B)).to(tl.float32)
    tl.store(p_out + tl.program_id(0), tl.sum(b_sum))


@triton.jit
def chase_kernel(p_next, p_index, HOPS: tl.constexpr):
    """Each load's address is what the one before it gave; the next launch goes on where this one ends."""
    index = tl.load(p_index)
    for _ in range(HOPS):
        index = tl.load(p_next + index)
    tl.store(p_index, index)


def launch_kernels(device: torch.device) -> None:
    """Each kernel once, with the constants and types that it is measured with: to compile them."""
    one, source = torch.ones(1, device=device), torch.empty(1024, dtype=torch.bfloat16, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    empty_kernel[(1,)](one)
    chained_kernel[(1,)](one)
    chained_kernel[(1,)](one, launch_pdl=True)
    read_kernel[(PROGRAMS,)](source, one, PER=BLOCKS, B=BLOCK, num_warps=8)
    chase_kernel[(1,)](index, index, HOPS=HOPS, num_warps=1)


def load_ns(device: torch.device, numbers: int, hops: int, alarm: Alarm) -> float:
    """Nanoseconds of a load that waits for the one before it, among so many numbers of 8 bytes."""
    stride = 33 * 16  # lines of 128 bytes: 33 is odd, so that none is met twice before all were, also where the walk starts over
    next_index = (torch.arange(numbers, device=device) + stride) % numbers
    index = next_index.sum().mul_(0).view(1)  # all are read once: what fits into the L2 cache is there
    return call_us(lambda i: chase_kernel[(1,)](next_index, index, HOPS=hops, num_warps=1), CALLS, device, alarm=alarm) / hops * 1e3


def latencies(device: torch.device, dry: bool, alarm: Alarm) -> dict[str, float]:
    """From the L2 cache: 2 MiB, which the L1 cache does not hold; and from memory: 2 GiB."""
    small, large, hops = (1 << 11, 1 << 12, 16) if dry else (1 << 18, 1 << 28, HOPS)
    return {"l2_ns": load_ns(device, small, hops, alarm), "memory_ns": load_ns(device, large, hops, alarm)}


def streams(device: torch.device, dry: bool, alarm: Alarm) -> dict[str, float]:
    """GB/s of a copy, its reads and writes counted, and of a read alone."""
    programs, per, block = (4, 2, 256) if dry else (PROGRAMS, BLOCKS, BLOCK)
    source = torch.randn(programs * per * block, device=device, dtype=torch.float16 if dry else torch.bfloat16)
    target, sums = torch.empty_like(source), torch.empty(programs, device=device)
    copied = call_us(lambda i: target.copy_(source), CALLS, device, alarm=alarm)
    read = call_us(lambda i: read_kernel[(programs,)](source, sums, PER=per, B=block, num_warps=8), CALLS, device, alarm=alarm)
    library = call_us(lambda i: torch.amax(source), CALLS, device, alarm=alarm)
    return {
        "copy_gb_s": 2 * source.nbytes / copied / 1e3,
        "read_gb_s": source.nbytes / min(read, library) / 1e3,
        "read_kernel_gb_s": source.nbytes / read / 1e3,
        "read_amax_gb_s": source.nbytes / library / 1e3,
    }


def products(device: torch.device, dry: bool, alarm: Alarm) -> dict[str, float]:
    size, dtype = (64, torch.float32) if dry else (8192, torch.bfloat16)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return {"mm_tflops": 2 * size**3 / call_us(lambda i: torch.mm(left, right), 5, device, alarm=alarm) / 1e6}


def launches(device: torch.device, dry: bool, alarm: Alarm) -> dict[str, float]:
    """Microseconds from the start of one launch to that of the next one, in a graph."""
    one, calls = torch.ones(1, device=device), 4 if dry else LAUNCHES
    times = {
        "empty_us": call_us(lambda i: empty_kernel[(1,)](one), calls, device, alarm=alarm),
        "torch_us": call_us(lambda i: one.add_(1), calls, device, alarm=alarm),
    }
    if not dry:
        times["empty_pdl_us"] = call_us(lambda i: chained_kernel[(1,)](one, launch_pdl=True), calls, device, alarm=alarm)
        times["chained_us"] = call_us(lambda i: chained_kernel[(1,)](one), calls, device, alarm=alarm)
    return times


def replays(device: torch.device, dry: bool, alarm: Alarm) -> dict[str, float]:
    """What replaying a graph of a step's size costs: the host's call, and the device from one replay to the next."""
    if dry:
        return {}
    one, graph = torch.ones(1, device=device), torch.cuda.CUDAGraph()
    with capture(graph, alarm):
        for _ in range(NODES):
            empty_kernel[(1,)](one)
    graph.replay()
    torch.cuda.synchronize()
    hosts = []
    for _ in range(20):
        hosts.append(host_us(graph.replay))
        torch.cuda.synchronize()
    single = statistics.median(event_us(graph.replay) for _ in range(20))

    def twice() -> None:
        graph.replay()
        graph.replay()

    both = statistics.median(event_us(twice) for _ in range(20))
    return {"replay_host_us": statistics.median(hosts), "replay_us": single, "replay_gap_us": max(both - 2 * single, 0.0)}


def attention_of_torch() -> dict[str, str]:
    """The signature of torch's paged attention, where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return {"varlen_attn": f"skipped: {error}"}
    return {"varlen_attn": str(inspect.signature(varlen_attn))}


def ceilings(device: torch.device, dry: bool, alarm: Alarm) -> Iterator[dict[str, Any]]:
    for part in (launches, replays, latencies, streams, products):
        try:
            yield dict(part(device, dry, alarm))
        except Exception as error:
            yield {"skipped": [f"{part.__name__}: {type(error).__name__}: {str(error)[:200]}"]}
    yield attention_of_torch()
