"""Errors of the device: memory that ran out ends a step's requests, anything else ends the engine, and with it its process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import torch

from mtpserve.config import EngineConfig
from mtpserve.core.errors import EngineDead
from mtpserve.core.request import Finish, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.faults import is_fatal
from mtpserve.engine.process.client import ProcessClient
from tests.engine.harness import PROMPTS, REFERENCE, Bench

ILLEGAL = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."""


def device_error(message: str, code: int | None = None) -> Exception:
    """As torch raises it: the code is set after the object was made."""
    error = torch.AcceleratorError(message)
    if code is not None:
        error.error_code = code
    return error


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (device_error(ILLEGAL, 700), True),
        (device_error(ILLEGAL), True),
        (device_error("CUDA error: unspecified launch failure", 719), True),
        (device_error("CUDA error: out of memory", 2), False),
        (device_error("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_which_errors_are_fatal(error: Exception, fatal: bool) -> None:
    assert is_fatal(error) is fatal


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_failed_device_ends_the_engine(
    where: str, overlap: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, error = Bench(overlap=overlap), device_error(ILLEGAL, 700)

    def fail(*_: object) -> None:
        raise error

    bench.add("r0")
    bench.step()
    bench.add("r1")
    if where == "result":
        bench.runner.raise_at, bench.runner.fault = {2}, error
    else:
        monkeypatch.setattr(bench.runner, "launch", fail)
    with caplog.at_level(logging.INFO), pytest.raises(EngineDead) as caught:
        bench.drain()
    assert str(caught.value) == "the device has failed: CUDA error: an illegal memory access was encountered"
    assert not caplog.messages, "the client logs the line"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), device_error("CUDA error: out of memory", 2)], ids=["torch", "library"]
)
def test_memory_that_runs_out_ends_a_step(error: Exception, overlap: int) -> None:
    bench = Bench(overlap=overlap, running=2)
    bench.runner.raise_at, bench.runner.fault = {3}, error
    for name in PROMPTS:
        bench.add(name)
    bench.drain()
    failed = {name for name, event in bench.last.items() if event.finish is Finish.ERROR}
    assert 0 < len(failed) <= 2 and all(type(error).__name__ in str(bench.last[name].error) for name in failed)
    assert all(bench.texts[name] == REFERENCE[name] for name in PROMPTS if name not in failed)


def build(config: EngineConfig, *, progress: bool) -> Engine:
    """For the process: a device that fails in its fourth step."""
    bench = Bench()
    bench.runner.raise_at, bench.runner.fault = {4}, device_error(ILLEGAL, 700)
    return bench.engine


def test_the_process_ends_and_open_requests_with_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))

    async def read(client: ProcessClient, name: str) -> None:
        async for events in client.submit(Request(name, PROMPTS[name], SamplingParams(max_tokens=100, ignore_eos=True))):
            assert all(event.finish is None for event in events)

    async def main() -> None:
        client = ProcessClient(EngineConfig(), factory="tests.engine.test_faults:build")
        try:
            await asyncio.wait_for(client.start(), 30)
            ended = await asyncio.wait_for(asyncio.gather(*(read(client, name) for name in ("r1", "r2")), return_exceptions=True), 20)
            assert all(isinstance(one, EngineDead) and "illegal memory access" in str(one) for one in ended), ended
            assert client._process is not None
            assert await asyncio.wait_for(client._process.wait(), 10) == 1
        finally:
            await client.stop()

    with caplog.at_level(logging.ERROR, "mtpserve"):
        asyncio.run(main())
    assert caplog.messages == ["the device has failed: CUDA error: an illegal memory access was encountered"]
