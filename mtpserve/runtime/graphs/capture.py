"""How a step is captured: by CUDA graphs, or by whatever a test puts in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from mtpserve.runtime.graphs.graph_key import GraphOutput

WARM_UPS = 2  # compile kernels and fill caches, neither of which may happen in a capture

Body = Callable[[], GraphOutput]


class CaptureFailed(Exception):
    """The step can be launched, but not captured. The cause says why."""


class GraphCapturer(Protocol):
    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        """Run `body` as often as needed, and give what its recorded run returns, and what repeats that run
        into the same tensors. Raises CaptureFailed."""
        ...


class CudaGraphCapturer:
    """All graphs share one pool of memory: only one of them runs at a time, and what one returns is kept
    alive by its owner. They share one stream too, since libraries keep a workspace for each stream that they
    have seen. After a failed capture the next ones share another pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.failed: list[torch.cuda.CUDAGraph] = []

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    body()
            current.wait_stream(self.stream)
            # torch.cuda.graph does not restore the stream if the end of the capture raises; the outer context
            # does.
            with torch.cuda.stream(current), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                output = body()
        except Exception as error:
            self.clean_up(graph)
            raise CaptureFailed from error
        return output, graph.replay

    def clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a failed capture. A torch without https://github.com/pytorch/pytorch/pull/180395 takes it for
        unfinished in its allocators. The device's can be told; the next capture would die of an internal
        assertion otherwise. The one of pinned memory cannot: it refuses the pool from then on (seen with
        torch 2.11), and still asks the failed graph what is its own, so that this is kept. That the pool may
        never be given back (https://github.com/pytorch/pytorch/pull/190348) does no harm: the graphs before
        use it.

        Raises torch.AcceleratorError where the device itself has failed."""
        with contextlib.suppress(RuntimeError):  # the capture has ended there, too
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        self.failed.append(graph)
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
