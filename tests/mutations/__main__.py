"""Does a test fail for each mutation? Applies each to a copy of the repository, and runs the tests that are named for it.

    python -m tests.mutations                     all mutations, with the selection of `make test`
    python -m tests.mutations --all               with the selection of `make test-all`
    python -m tests.mutations scheduler pages     those whose names or rooms begin so

Exit code 1: a mutation survived, or could not be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Literal

from tests.mutations.catalogue import ROOT, Mutation, MutationError, mutations

SELECTION = "MTPSERVE_TEST_ALL"  # "1": the selection of `make test-all`
LEAST_S, TIMES = 300.0, 10.0  # a run that takes so long, and so many times as long as without the mutation, hangs
WHOLE_S = 4 * 3600.0
WHOLE = ("tests", "--ignore=tests/mutations")
EVERY_TEST_PASSED, SOME_FAILED, INTERRUPTED = 0, 1, 2  # pytest's exit codes

Outcome = Literal["killed", "survived", "error"]


@dataclass(frozen=True, slots=True)
class Result:
    room: str
    name: str
    outcome: Outcome
    seconds: float
    reason: str = ""  # the test that failed, or why there is no result


@dataclass(frozen=True, slots=True)
class Run:
    code: int | None  # pytest's exit code; None: it took too long
    seconds: float
    output: str

    @property
    def reason(self) -> str:
        """The first failure in pytest's summary, or the last line."""
        lines = self.output.strip().splitlines() or ["no output"]
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return (failures or lines[-1:])[0][:200]


class Copy:
    """The tracked files in a folder of their own, as they are in the working tree."""

    def __init__(self, folder: Path, every_test: bool) -> None:
        self.folder, self._every_test, self._writes = folder, every_test, 0
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
        for name in filter(None, listed.split("\0")):
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

    def run(self, arguments: Sequence[str], limit: float) -> Run:
        """The copy's packages come first on the path, in subprocesses of the tests, too."""
        paths = os.pathsep.join([str(self.folder), str(self.folder / "kernels")])
        environment = {name: value for name, value in os.environ.items() if name != SELECTION}
        environment |= {"PYTHONPATH": paths} | ({SELECTION: "1"} if self._every_test else {})
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=limit)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            code = None
        return Run(code, time.monotonic() - started, output)


class Trial:
    """`copies`: one for each worker. `whole`: all tests are run where those that are named pass."""

    def __init__(self, copies: Sequence[Copy], whole: bool) -> None:
        self._copies = SimpleQueue[Copy]()
        for copy in copies:
            self._copies.put(copy)
        self._whole = whole
        self._unchanged: dict[str, Run] = {}

    def check(self, tests: str) -> None:
        """Run these tests, an argument of pytest, without a mutation."""
        copy = self._copies.get()
        try:
            self._unchanged[tests] = run = copy.run([tests], WHOLE_S)
        finally:
            self._copies.put(copy)
        print(f"{'passed' if run.code == EVERY_TEST_PASSED else 'error':8} {run.seconds:5.0f} s  {tests}", flush=True)

    def result(self, mutation: Mutation) -> Result:
        unchanged = [self._unchanged[tests] for tests in mutation.tests]
        seconds = sum(run.seconds for run in unchanged)
        if failed := [run for run in unchanged if run.code != EVERY_TEST_PASSED]:
            return Result(mutation.room, mutation.name, "error", seconds, f"without the mutation: {failed[0].reason}")
        copy = self._copies.get()
        original = (copy.folder / mutation.file).read_text(encoding="utf-8")
        try:
            copy.write(mutation.file, mutation.applied(original))
            result = judged(mutation, copy.run(mutation.tests, max(LEAST_S, TIMES * seconds)))
            if result.outcome == "survived" and self._whole:
                result = judged(mutation, copy.run(WHOLE, WHOLE_S))
        except MutationError as error:
            result = Result(mutation.room, mutation.name, "error", 0.0, str(error))
        finally:
            copy.write(mutation.file, original)
            self._copies.put(copy)
        print(f"{result.outcome:8} {result.seconds:5.0f} s  {result.room}/{result.name}  {result.reason}", flush=True)
        return result


def judged(mutation: Mutation, run: Run) -> Result:
    if run.code is None:
        return Result(mutation.room, mutation.name, "killed", run.seconds, "the tests hang")
    if run.code == EVERY_TEST_PASSED:
        return Result(mutation.room, mutation.name, "survived", run.seconds)
    # A negative code is a signal: a crash of the process, or the end of a test that hangs.
    outcome: Outcome = "killed" if run.code in (SOME_FAILED, INTERRUPTED) or run.code < 0 else "error"
    return Result(mutation.room, mutation.name, outcome, run.seconds, run.reason)


def selected(names: Sequence[str]) -> list[Mutation]:
    return [one for one in mutations() if not names or one.name.startswith(tuple(names)) or one.room in names]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Does a test fail for each mutation?")
    parser.add_argument("names", nargs="*", help="rooms, or beginnings of names; all by default")
    parser.add_argument("--all", action="store_true", help="the selection of `make test-all`")
    parser.add_argument("--whole", action="store_true", help="run all tests where the named ones pass")
    parser.add_argument("--jobs", type=int, default=1, help="mutations that are tried at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results into this file")
    options = parser.parse_args()
    chosen = selected(options.names)
    if not chosen:
        parser.error(f"no mutation is named {', '.join(options.names)}")
    with TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        copies = [Copy(Path(directory) / str(number), options.all) for number in range(options.jobs)]
        trial = Trial(copies, options.whole)
        list(pool.map(trial.check, sorted({tests for one in chosen for tests in one.tests})))
        results = list(pool.map(trial.result, chosen))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    counts = Counter(result.outcome for result in results)
    for room in sorted({result.room for result in results}):
        of_room = Counter(result.outcome for result in results if result.room == room)
        print(f"{room:16} {of_room['killed']:3} of {of_room.total()} killed")
    for result in results:
        if result.outcome != "killed":
            print(f"{result.outcome}: {result.room}/{result.name} {result.reason}")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["killed"] < len(results))


if __name__ == "__main__":
    sys.exit(main())
