"""The number of threads follows the cores that other processes leave."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtpserve.engine.process import core_share
from mtpserve.engine.process.core_share import CoreShare, CoreTimes, core_times


class Machine:
    """A machine in simulated time, whose other processes want `others` cores and share them fairly."""

    def __init__(self, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cores, self.others, self.now, self.own, self.idle = cores, 0.0, 0.0, 0.0, 0.0
        self.threads = cores
        monkeypatch.setattr(core_share, "perf_counter", lambda: self.now)

    def set_threads(self, threads: int) -> None:
        self.threads = threads

    def read(self) -> CoreTimes:
        return CoreTimes(self.now, self.own, self.idle)

    def run(self, seconds: int, share: CoreShare, busy: float = 1.0) -> list[int]:
        """→ the threads after each second. `busy`: the part of the time in which the engine has work."""
        numbers = []
        for _ in range(seconds):
            demand = self.threads * busy + self.others
            scale = min(1.0, self.cores / demand) if demand else 1.0
            self.now, self.own = self.now + 1.0, self.own + self.threads * busy * scale
            self.idle += self.cores - demand * scale
            share.update()
            numbers.append(self.threads)
        return numbers


def share_on(machine: Machine) -> CoreShare:
    return CoreShare(machine.threads, machine.set_threads, machine.read)


@pytest.mark.parametrize(
    ("cores", "others", "threads"), [(2, 1, 1), (2, 2, 1), (4, 1, 3), (4, 3, 2), (16, 0.4, 16), (2, 0.4, 2), (2, 16, 1)]
)
def test_threads_that_would_wait_for_a_core_do_not_compute(
    cores: int, others: float, threads: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(cores, monkeypatch)
    share = share_on(machine)
    assert machine.run(5, share) == [cores] * 5
    machine.others = others
    with caplog.at_level(logging.INFO):
        beside = machine.run(8, share)
        machine.others = 0.0
        assert beside[0] == cores and beside[-1] == threads and machine.run(8, share)[-1] == cores
    changes = [record.getMessage() for record in caplog.records]
    assert (changes == []) == (threads == cores)
    if threads < cores:
        assert (
            "other processes use the cores" in changes[0]
            and f"using {cores} of {cores} CPU threads: the cores are free again" == changes[-1]
        )


def test_one_window_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2, monkeypatch)
    share = share_on(machine)
    for _ in range(4):
        machine.others = 2.0
        machine.run(1, share)
        machine.others = 0.0
        assert machine.run(2, share) == [2, 2]


def test_an_engine_with_little_work_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(4, monkeypatch)
    assert set(machine.run(10, share_on(machine), busy=0.05)) == {4}


@pytest.mark.parametrize("max_threads", [0, 1])
def test_a_number_that_is_asked_for_stays(max_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1, monkeypatch)
    machine.others = 3.0
    CoreShare(max_threads, machine.set_threads, lambda: pytest.fail("nothing is read")).update()
    assert machine.threads == 1


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core_share, "CPU_TIMES", tmp_path / "none")
    assert core_times() is None
    CoreShare(4, lambda threads: pytest.fail("nothing is known")).update()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
def test_the_front_ends_time_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works on what the engine writes: an engine that gave it a core would have less to write."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as parent:
        try:
            monkeypatch.setattr(os, "getppid", lambda: parent.pid)
            end = time.monotonic() + 30
            while (times := core_times()) is not None and times.cpu < time.process_time() + 0.05 and time.monotonic() < end:
                time.sleep(0.05)
            assert times is not None and times.cpu > time.process_time()
        finally:
            parent.kill()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
def test_idle_time_is_that_of_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [
        "cpu  1 1 1 999999 1 1 1 0 0 0",
        f"cpu0 1 1 1 {3 * ticks} {ticks} 1 1 0 0 0",
        f"cpu1 1 1 1 {5 * ticks} 0 1 1 0 0 0",
        "intr 1 2 3",
    ]
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(core_share, "CPU_TIMES", tmp_path / "stat")
    for cores, idle in (({0}, 4.0), ({0, 1}, 9.0), ({7}, 0.0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        times = core_times()
        assert times is not None and times.idle == idle
