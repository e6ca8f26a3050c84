"""Times of calls: on a GPU in captured graphs, by events; on a CPU by the host's clock, which says nothing about a GPU. And time limits."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from types import FrameType

import torch

SAMPLES = 7
DELAY_CYCLES = 600_000  # 0.3 ms at 2 GHz: more than the host takes to launch a graph of a thousand kernels
FAILED_GRAPHS: list[torch.cuda.CUDAGraph] = []  # the allocators of some torch versions still ask them what is theirs


class TimeLimit(BaseException):
    """The part's time is over. No `except Exception` of an engine may take it for a failure of its own."""


class Alarm:
    """Raises TimeLimit in the main thread once `seconds` have passed; inside `critical_section` only afterwards."""

    def __init__(self, seconds: float) -> None:
        self.end, self.inside, self.due = time.perf_counter() + seconds, 0, False

    @contextmanager
    def set(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self.ring)
        # Again and again: an exception in a destructor is lost.
        signal.setitimer(signal.ITIMER_REAL, max(self.end - time.perf_counter(), 1e-3), 0.5)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def ring(self, number: int, frame: FrameType | None) -> None:
        self.due = True
        if not self.inside:
            raise TimeLimit

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.perf_counter()

    @contextmanager
    def critical_section(self) -> Iterator[None]:
        """What must not be left half done, like a capture: the stream would stay in it."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
        if self.due and not self.inside:
            raise TimeLimit


@cache
def capture_stream() -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, alarm: Alarm | None) -> Iterator[None]:
    """Without what torch.cuda.graph does before: it empties the allocator's cache, and thousands of graphs are captured here."""
    stream, pool = capture_stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with nullcontext() if alarm is None else alarm.critical_section(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            yield
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            # As runtime.graphs.capture.CudaGraphCapturer.clean_up: the allocator takes the capture for unfinished, and the next one would
            # fail.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            FAILED_GRAPHS.append(graph)
            raise
    torch.cuda.current_stream().wait_stream(stream)


def event_us(run: Callable[[], object]) -> float:
    """Of the device, which is busy when `run` launches: what the host takes to launch is not in it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(DELAY_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def host_us(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def call_us(body: Callable[[int], object], calls: int, device: torch.device, samples: int = SAMPLES, alarm: Alarm | None = None) -> float:
    """Microseconds of one call of `body`, which gets the call's number, among `calls` that follow each other: the median of `samples`."""
    if device.type != "cuda":
        body(0)
        return statistics.median(host_us(partial(body, i)) for i in range(min(samples, calls)))
    capture_stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(capture_stream()):
        body(0)  # compiles, and lets libraries allocate their workspace for this stream: neither may happen in a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(graph, alarm):
        for i in range(calls):
            body(i)
    graph.replay()
    return statistics.median(event_us(graph.replay) / calls for _ in range(samples))


def rotation(num_bytes: float, least: int = 1, most: int = 256, rotated: float = 150e6) -> int:
    """Copies of something of this size, so that calls that take one after the other find none of it in the L2 cache."""
    return max(least, min(most, -(-int(rotated) // max(int(num_bytes), 1))))
