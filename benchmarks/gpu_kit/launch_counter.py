"""The launches of a cell's step as a GPU with 132 processors would see them, counted without one.

The engine and its kernels keep tensors for later calls. Here they would be fake ones, so that a process that counts does nothing else.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from gpu_kit.launches import Launch, LaunchRecorder, recording
from gpu_kit.models import Cell, DeviceConfig, engine_of, fake_model, key_of, runner_of, traffic_of
from mtpserve.runtime.graphs.capture import Body
from mtpserve.runtime.graphs.graph_key import GraphOutput
from mtpserve.runtime.transfer import staged

PROCESSORS = 132  # of an H100 and an H200
CPU = torch.device("cpu")
# Their kernels ask for the device's processors. A module that is imported later would ask for the real ones.
KERNEL_MODULES = "mtpserve.layers.devices.triton_kernels", "mtpserve_kernels.attention.span", "mtpserve_kernels.attention.select"
Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


@contextmanager
def patch_function(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """In every module of the engine and its kernels that has a function of this name, its own or an imported one."""
    modules = [module for key, module in sorted(sys.modules.items()) if key.startswith("mtpserve") and hasattr(module, name)]
    originals = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, name, original)


@cache
def fake_mode() -> FakeTensorMode:
    """The process's only one: what is kept of one would not fit into another."""
    return FakeTensorMode()


@contextmanager
def fake() -> Iterator[None]:
    """Tensors have no memory, and kernels think that they are on an H100."""
    mode = fake_mode()
    for name in KERNEL_MODULES:
        import_module(name)

    def staged_fake(lists: Any, device: torch.device) -> list[Tensor]:
        with unset_fake_temporarily():  # it writes numbers by way of numpy
            real = staged(lists, device)
        return [mode.from_tensor(tensor) for tensor in real]

    with (
        mode,
        patch_function("staged", staged_fake),
        patch_function("processors_of", lambda device: PROCESSORS),
        patch_function("chip_of", lambda device: "sm_90"),
        patch_function("has_float32_product", lambda device: True),
    ):
        yield


class CountingRecorder:
    """runtime.graphs.capture.GraphCapturer that captures nothing: it writes down the launches of the body's second run, without memory."""

    def __init__(self) -> None:
        self.recorder: LaunchRecorder | None = None

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        assert self.recorder is not None
        with recording(LaunchRecorder(self.recorder.traffic), execute=False):
            body()  # constants are made then
        with recording(self.recorder, execute=False):
            output = body()
        return output, lambda: None


def launches_of(device_config: DeviceConfig, cell: Cell, observer: Observer | None = None) -> list[Launch]:
    """In the order in which they are launched. `observer`: as LaunchRecorder's."""
    counting, level = CountingRecorder(), logging.getLogger("mtpserve").level
    logging.getLogger("mtpserve").setLevel(logging.ERROR)
    try:
        with fake():
            model = fake_model(device_config.model_config(cell.model), device_config.dtype, cell.context + 2048)
            engine = engine_of(model, cell, CPU, counting)
            key = key_of(engine, cell)
            rows = key.rows or key.requests * key.width
            counting.recorder = LaunchRecorder(traffic_of(engine, model, cell, rows), observer)
            if runner_of(engine)[1].capture(key) is None:
                raise RuntimeError(f"{cell}: its step cannot be recorded")
            return counting.recorder.launches
    finally:
        logging.getLogger("mtpserve").setLevel(level)
