"""Does a test fail for each mutation? Applies each to a copy of the repository, and runs the tests that are named for it.

    python -m tests.mutations                     all mutations, with the selection of `make test`
    python -m tests.mutations --all               with the selection of `make test-all`
    python -m tests.mutations paging stop_token   a room, and those whose names begin so

Exit code 1: a mutation survived, or could not be tried.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Literal

from tests.mutations.catalogue import Mutation, MutationError, mutations
from tests.mutations.copies import Copy, Run

LIMIT_S, WHOLE_S = 600.0, 4 * 3600.0  # a run that takes longer hangs
WHOLE = ("tests", "--ignore=tests/mutations")

Outcome = Literal["killed", "survived", "error"]


@dataclass(frozen=True, slots=True)
class Result:
    room: str
    name: str
    outcome: Outcome
    seconds: float
    test: str = ""  # that failed
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:8} {self.seconds:5.0f} s  {self.room}/{self.name}  {self.test}  {self.reason}".rstrip()


class Trial:
    """`copies`: one for each worker. `whole`: all tests are run where those that are named pass."""

    def __init__(self, copies: Sequence[Copy], whole: bool) -> None:
        self._copies = SimpleQueue[Copy]()
        for copy in copies:
            self._copies.put(copy)
        self._whole = whole
        self._passing = set[tuple[str, ...]]()  # tests that pass without a mutation

    def result(self, mutation: Mutation) -> Result:
        copy = self._copies.get()
        try:
            result = self._tried(copy, mutation)
        except MutationError as error:
            result = Result(mutation.room, mutation.name, "error", 0.0, reason=str(error))
        finally:
            self._copies.put(copy)
        print(result, flush=True)
        return result

    def _tried(self, copy: Copy, mutation: Mutation) -> Result:
        original = (copy.folder / mutation.file).read_text(encoding="utf-8")
        copy.write(mutation.file, mutation.applied(original))
        try:
            compiles = mutation.file.endswith((".cpp", ".h"))
            run = copy.run(mutation.tests, LIMIT_S, compiles)
            if run.passed and self._whole:
                run = copy.run(WHOLE, WHOLE_S, compiles)
        finally:
            copy.write(mutation.file, original)
        outcome: Outcome = "survived" if run.passed else "killed"
        if not run.passed and not self._passes(copy, (run.failed,) if run.failed else mutation.tests):
            outcome = "error"
        return Result(mutation.room, mutation.name, outcome, run.seconds, run.failed, explained(run, outcome))

    def _passes(self, copy: Copy, tests: tuple[str, ...]) -> bool:
        """Without a mutation."""
        if tests not in self._passing and copy.run(tests, LIMIT_S).passed:
            self._passing.add(tests)
        return tests in self._passing


def explained(run: Run, outcome: Outcome) -> str:
    return f"without the mutation, too: {run.reason}" if outcome == "error" else run.reason


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
        trial = Trial([Copy(Path(directory) / str(number), options.all) for number in range(options.jobs)], options.whole)
        results = list(pool.map(trial.result, chosen))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(results)))
    return int(any(result.outcome != "killed" for result in results))


def summary(results: Sequence[Result]) -> list[str]:
    """The rooms, and what was not killed."""
    rooms = {room: Counter(result.outcome for result in results if result.room == room) for room in {result.room for result in results}}
    lines = [f"{room:12} {rooms[room]['killed']:3} of {rooms[room].total():3} killed" for room in sorted(rooms)]
    lines += [str(result) for result in results if result.outcome != "killed"]
    counts = Counter(result.outcome for result in results)
    return [*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts.items())]


if __name__ == "__main__":
    sys.exit(main())
