"""Copies of the working tree, in which a file may be changed and pytest be run, each run in a process of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutations.catalogue import ROOT

SELECTION = "MTPSERVE_TEST_ALL"  # "1": the selection of `make test-all`
HANGS = "the tests hang"
PR_SET_PDEATHSIG = 1
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.mutations.preloaded"])


@dataclass(frozen=True, slots=True)
class Run:
    passed: bool
    seconds: float
    failed: str = ""  # the first test that failed, or the file that could not be collected
    reason: str = ""  # why, in a line


class FirstFailure:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.failed = self.reason = ""

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            lines = report.longreprtext.strip().splitlines() or [""]
            errors = [line[1:].strip() for line in lines if line.startswith("E ")]
            self.failed, self.reason = report.nodeid, (errors or lines[-1:])[0][:160]

    pytest_runtest_logreport = pytest_collectreport = note


class Copy:
    """The files of the working tree that git does not ignore, in a folder of their own."""

    def __init__(self, folder: Path, every_test: bool) -> None:
        self.folder, self._every_test, self._writes = folder, every_test, 0
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        for name in filter(None, set(listed.split("\0"))):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, file: str, text: str) -> None:
        """The time of the change differs from all earlier ones by seconds, which is how Python tells that compiled files are old."""
        self._writes += 2
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        changed = path.stat().st_mtime + self._writes
        os.utime(path, (changed, changed))

    def run(self, tests: Sequence[str], limit: float, compiles: bool = False) -> Run:
        """`compiles`: kernels from changed sources, which are kept in the copy and not in the user's cache."""
        receiver, sender = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=run_pytest, args=(self.folder, tests, self._every_test, compiles, sender))
        started = time.monotonic()
        process.start()
        sender.close()
        try:
            code, failed, reason = receiver.recv() if receiver.poll(limit) else (1, "", HANGS)
        except EOFError:
            code, failed, reason = 1, "", "the process of the tests ended"
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)  # with what the tests have started
        process.join()
        receiver.close()
        return Run(code == pytest.ExitCode.OK, time.monotonic() - started, failed, reason)


def run_pytest(folder: Path, tests: Sequence[str], every_test: bool, compiles: bool, sender: Connection) -> None:
    """In a process that was forked for it. The copy's packages come first on the path, in the subprocesses of tests, too."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else would end it
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / "kernels")])
    if compiles:
        os.environ["XDG_CACHE_HOME"] = str(folder / ".cache")
    os.environ[SELECTION] = "1" if every_test else "0"
    sys.path[:] = [str(folder), *(path for path in sys.path if path and Path(path) != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    first = FirstFailure()
    code = pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests], plugins=[first])
    sender.send((int(code), first.failed, first.reason or f"pytest's exit code is {int(code)}"))
    sender.close()
    signal.pause()  # what ends this process ends all that the tests have started
