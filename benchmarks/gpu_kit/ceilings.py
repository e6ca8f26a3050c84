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
def chase_kernel(p_next, p_place, HOPS: tl.constexpr):
    """Each load's address is what the one before it gave; the next launch goes on where this one ends."""
    place = tl.load(p_place)
    for _ in range(HOPS):
        place = tl.load(p_next + place)
    tl.store(p_place, place)


def load_ns(device: torch.device, numbers: int, hops: int, alarm: Alarm) -> float:
    """Nanoseconds of a load that waits for the one before it, among so many numbers of 8 bytes."""
    stride = 513  # 4 KiB and 8 bytes: no line is met twice before all were
    places = (torch.arange(numbers, device=device) + stride) % numbers
    place = places.sum().mul_(0).view(1)  # all are read once: what fits into the L2 cache is there
    return call_us(lambda i: chase_kernel[(1,)](places, place, HOPS=hops, num_warps=1), 3, device, alarm=alarm) / hops * 1e3


def latencies(device: torch.device, dry: bool, alarm: Alarm) -> dict[str, float]:
    """From the L2 cache: 2 MiB, which the L1 cache does not hold; and from memory: 2 GiB."""
    small, large, hops = (1 << 11, 1 << 12, 16) if dry else (1 << 18, 1 << 28, 2048)
    return {"l2_ns": load_ns(device, small, hops, alarm), "memory_ns": load_ns(device, large, hops, alarm)}


def streams(device: torch.device, dry: bool, alarm: Alarm) -> dict[str, float]:
    """GB/s of a copy, its reads and writes counted, and of a read alone."""
    programs, per, block = (4, 2, 256) if dry else (8192, 32, 4096)
    source = torch.randn(programs * per * block, device=device, dtype=torch.float16 if dry else torch.bfloat16)
    target, sums = torch.empty_like(source), torch.empty(programs, device=device)
    copied = call_us(lambda i: target.copy_(source), 3, device, alarm=alarm)
    read = call_us(lambda i: read_kernel[(programs,)](source, sums, PER=per, B=block, num_warps=8), 3, device, alarm=alarm)
    library = call_us(lambda i: torch.amax(source), 3, device, alarm=alarm)
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
