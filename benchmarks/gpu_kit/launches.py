"""The ordered launches of a step's body: Triton kernels and aten operators, with shapes, bytes and operations.

The body runs once while this writes down what it launches. On a GPU the launches happen, too. Without one the tensors are fake: they have
shapes and no memory, so that a model of 30 B parameters fits. What a library makes of one operator, one kernel or two, is not seen here.

Bytes are those that a launch must move: a tensor that is read or written counts once. Four kinds of tensors count in part:

    keys and values     the context of all requests where the kernel attends, else one row for each row of the step
    experts' matrices   the experts that so many rows hit if each row chooses uniformly
    splits' parts       the splits that have work
    other state         one row for each row of the step: tables of positions, pages, seats and embeddings
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# They allocate, or give a view.
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "_reshape_alias", "alias", "detach",
    "lift_fresh",
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
GATHERS = {"embedding", "index_select", "index", "gather"}
SCATTERS = {"index_put_", "_index_put_impl_", "index_copy_", "scatter_", "index_fill_"}
ATTENDS = ("span", "select")  # parts of the names of kernels that read the whole context
PARTS = ("span", "combine")  # parts of the names of kernels whose fourth dimension, or third of three, is that of splits
TILE_TABLES = ("p_tiles",)  # of rows that are grouped by expert: as long as there may be tiles
KEY_BLOCK = 64  # keys in a block of a split

TRITON, PRODUCT, TORCH = "triton", "product", "torch"


@dataclass(frozen=True, slots=True)
class Launch:
    """One Triton kernel, or one aten operator."""

    name: str
    kind: str  # TRITON, PRODUCT or TORCH
    shapes: str  # of its tensors, for people
    rows: int
    num_bytes: float
    flops: float
    grid: tuple[int, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)  # of a Triton kernel, options like num_warps included
    product: tuple[int, int, int, int] = (0, 0, 0, 0)  # batch, outputs, inputs, rows of a PRODUCT
    busy_share: float = 1.0  # share of the grid's blocks that have work, where experts are chosen


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the tensors of a body are; they are told apart by their storages."""

    requests: int
    context: int
    rows: int  # of the widest launch
    pools: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    experts: int = 0
    top_k: int = 0

    def hit_share(self, rows: int) -> float:
        """Share of the experts that so many rows hit."""
        return 1 - (1 - self.top_k / self.experts) ** rows if self.experts else 1.0


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def size_of(tensor: Tensor) -> float:
    """Bytes; what is expanded counts once."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return float(prod(size for size, stride in strides if stride) * tensor.itemsize)


def tensor_label(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class LaunchRecorder(TorchDispatchMode):
    """Writes down launches while it is entered, and when each began and ended by the host's clock, in microseconds. `observer` gets each
    Triton launch's kernel, positional and named arguments."""

    def __init__(self, traffic: Traffic, observer: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic, self.observer = traffic, observer
        self.launches: list[Launch] = []
        self.times: list[tuple[float, float]] = []
        self.body_storages: set[int] = set()  # storages that the body has made
        self.launching = False  # the interpreter copies tensors, and its copies are no launches

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.launching or function.name().startswith("prim::"):  # of fake tensors: their device
            return function(*args, **kwargs)
        with self:
            parts = function.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        clock_start = perf_counter()
        out = function(*args, **kwargs)
        clock_end = perf_counter()
        name = function.name().split("::")[-1].split(".")[0]
        view = any(value.alias_info is not None and not value.alias_info.is_write for value in function._schema.returns)
        outputs = list(tensors_in([out]))
        if not view:
            self.body_storages |= {storage_of(tensor) for tensor in outputs} - self.traffic.weights - self.traffic.pools
            if name not in NO_KERNEL and any(tensor.numel() for tensor in outputs):
                self.launches.append(self.operator(name, list(tensors_in([*args, *kwargs.values()])), outputs))
                self.times.append((clock_start * 1e6, clock_end * 1e6))
        return out

    def operator(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Launch:
        shapes = f"{' '.join(map(tensor_label, inputs))} → {' '.join(map(tensor_label, outputs))}"
        rows = outputs[0].shape[0] if outputs[0].dim() else 1
        if name in PRODUCTS:
            left, right = inputs[-2:] if name in ("addmm", "baddbmm") and len(inputs) == 3 else inputs[:2]
            batch, (many, depth), wide = prod(left.shape[:-2]), left.shape[-2:], right.shape[-1]
            num_bytes = sum(map(size_of, (left, right, *outputs)))
            return Launch(name, PRODUCT, shapes, many, num_bytes, 2.0 * batch * many * depth * wide, product=(batch, wide, depth, many))
        if name in GATHERS:
            return Launch(name, TORCH, shapes, rows, 2 * sum(map(size_of, outputs)), 0.0)
        if name in SCATTERS:
            return Launch(name, TORCH, shapes, rows, 2 * max((size_of(tensor) for tensor in inputs[1:]), default=8.0), 0.0)
        num_bytes = sum(self.moved_bytes(tensor, rows, "") for tensor in {id(tensor): tensor for tensor in (*inputs, *outputs)}.values())
        return Launch(name, TORCH, shapes, rows, num_bytes, 0.0)

    def kernel(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        name = str(kernel.__name__)
        body_tensors = [
            tensor
            for key, tensor in tensors.items()
            if key not in TILE_TABLES and storage_of(tensor) in self.body_storages and tensor.dim() > 1
        ]
        rows = max((tensor.shape[0] for tensor in body_tensors), default=self.traffic.rows)
        routed = any(self.is_routed(tensor) for tensor in tensors.values())
        unique = {(storage_of(tensor), tensor.storage_offset(), tensor.shape): tensor for tensor in tensors.values()}
        self.launches.append(
            Launch(
                name=name,
                kind=TRITON,
                shapes=" ".join(f"{key}:{tensor_label(tensor)}" for key, tensor in tensors.items()),
                rows=rows,
                num_bytes=sum(self.moved_bytes(tensor, rows, name) for tensor in unique.values()),
                flops=self.flops(tensors.values(), rows),
                grid=tuple(map(int, grid)),
                constants={key: value for key, value in values.items() if isinstance(value, bool | int | float | str)},
                busy_share=self.traffic.hit_share(rows) if routed else 1.0,
            )
        )
        if self.observer is not None:
            self.observer(kernel, args, dict(kwargs))

    def moved_bytes(self, tensor: Tensor, rows: int, kernel: str) -> float:
        """Bytes of this tensor that a launch moves."""
        size, traffic, storage = size_of(tensor), self.traffic, storage_of(tensor)
        if storage in self.body_storages:
            if tensor.dim() > 2 and tensor.dtype == torch.float32 and any(part in kernel for part in PARTS):
                blocks = -(-traffic.context // KEY_BLOCK)
                return size * min(1.0, blocks / tensor.shape[2])
            return size
        if storage in traffic.pools:
            slots = traffic.requests * traffic.context if any(part in kernel for part in ATTENDS) else rows
            return min(size, slots * size / max(tensor.shape[0], 1))
        if storage in traffic.weights:
            return size * traffic.hit_share(rows) if self.is_routed(tensor) else size
        return min(size, rows * size / tensor.shape[0]) if tensor.dim() else size

    def is_routed(self, tensor: Tensor) -> bool:
        """A matrix for each expert."""
        return storage_of(tensor) in self.traffic.weights and tensor.dim() == 3 and tensor.shape[0] == self.traffic.experts

    def flops(self, tensors: Iterable[Tensor], rows: int) -> float:
        """Two for each weight that a row meets; of experts those that it chose."""
        total = 0.0
        for tensor in tensors:
            if storage_of(tensor) in self.traffic.weights and tensor.dim() > 1:
                share = self.traffic.top_k / self.traffic.experts if self.is_routed(tensor) else 1.0
                total += 2.0 * rows * tensor.numel() * share
        return total


def jit_classes() -> list[Any]:
    """What `@triton.jit` makes, compiled or interpreted."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return [JITFunction, InterpretedFunction]


@contextmanager
def launch_hook(run: Callable[[Any, Any, tuple[Any, ...], Any, dict[str, Any]], Any]) -> Iterator[None]:
    """Each launch calls `run` with the original method, the kernel, its arguments, the grid and its named arguments."""
    originals = [(jit_class, jit_class.run) for jit_class in jit_classes()]

    def launcher(original: Any) -> Callable[..., Any]:
        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
            return run(original, kernel, args, grid, kwargs)

        return launch

    try:
        for jit_class, original in originals:
            jit_class.run = launcher(original)
        yield
    finally:
        for jit_class, original in originals:
            jit_class.run = original


@contextmanager
def recording(recorder: LaunchRecorder, execute: bool) -> Iterator[list[Launch]]:
    """Launches of what runs inside. `execute`: they happen, too."""

    def run(original: Any, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Any:
        recorder.kernel(kernel, args, kwargs, grid)
        recorder.launching, clock_start = True, perf_counter()
        try:
            return original(kernel, *args, grid=grid, warmup=False, **kwargs) if execute else None
        finally:
            recorder.launching = False
            recorder.times.append((clock_start * 1e6, perf_counter() * 1e6))

    with launch_hook(run), recorder:
        yield recorder.launches
