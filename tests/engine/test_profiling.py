"""A trace of steps in one process: when it ends, and that its writing counts as no hang."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest
import torch

from mtpserve.config import EngineConfig
from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.process.client import ProcessClient
from mtpserve.engine.process.messages import Events, Silent
from mtpserve.engine.process.profiling import Profiling


def test_a_trace_ends_after_its_steps(tmp_path: Path) -> None:
    announced: list[list[Path]] = []
    profiling = Profiling(3, announce=lambda: announced.append([file for file in tmp_path.iterdir() if file.stat().st_size]))
    change = ProfileChange(folder=str(tmp_path), name="a", steps=2)
    with profiling.step():  # of none that is being taken
        pass
    assert profiling.take(change) == ProfileReport()
    assert profiling.take(change).refused == "a profile is being taken already"
    for _ in range(3):
        with profiling.step():
            torch.ones(2) + 1
    assert announced == [[]], "once, before anything was written"
    (file,) = profiling.take(ProfileChange()).files
    assert Path(file) == tmp_path / "a-engine3-rank0.trace.json.gz"
    names = [event["name"] for event in json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]]
    assert names.count("step") == names.count("aten::add") == 2
    assert profiling.take(ProfileChange()).refused == "no profile is being taken"
    assert "exists" in profiling.take(change).failed, "files are not written over"


def test_a_failure_ends_the_trace_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiling = Profiling(0)
    profiling.take(ProfileChange(folder=str(tmp_path), name="a", steps=9))
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: 1 / 0)
    assert profiling.take(ProfileChange()).failed == "ZeroDivisionError: division by zero"
    monkeypatch.undo()
    profiling.take(ProfileChange(folder=str(tmp_path), name="b", steps=9))
    assert profiling.take(ProfileChange()).files


def test_who_writes_a_trace_has_announced_that_it_is_silent() -> None:
    async def signs() -> list[bool]:
        client = ProcessClient(EngineConfig())
        found = []
        try:
            for message in (None, Silent(), Events([], EngineStats())):
                if message is not None:
                    client._receive(message)
                first = client._signs()
                await asyncio.sleep(0.001)
                found.append(first != client._signs())
        finally:
            await client.stop(0)
        return found

    assert asyncio.run(signs()) == [False, True, False]
