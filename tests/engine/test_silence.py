"""When an engine's process counts as hung, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import os

import pytest

from mtpserve.engine.process import hang

LIMIT = 8.0  # seconds: a look each second


def looks(monkeypatch: pytest.MonkeyPatch, slept: int | None, beats: int = 0) -> int:
    """How often is looked until the process counts as hung. `slept`: the look before which the machine has slept for an hour; `beats`:
    looks at which the process has got on."""
    now, looked = 0.0, 0

    async def sleep(seconds: float) -> None:
        nonlocal now, looked
        looked += 1
        now += 3600.0 if looked == slept else seconds

    monkeypatch.setattr(hang, "monotonic", lambda: now)
    monkeypatch.setattr(hang.asyncio, "sleep", sleep)
    asyncio.run(hang.silence(lambda: min(looked, beats), os.getpid(), LIMIT))
    return looked


def test_a_process_without_a_sign_of_life_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(monkeypatch, None) == 9
    assert looks(monkeypatch, None, beats=5) == 5 + 8


def test_a_machine_that_has_slept_has_lost_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(monkeypatch, 4) == 8
