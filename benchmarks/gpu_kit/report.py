"""The result of a run as it grows: parts with time limits, each record kept as it comes, and the file that they are written to."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_kit.timing import Alarm, TimeLimit

WRITE_EVERY_S = 3.0
DIGITS = 5  # that are kept of a number

Records = Callable[[Alarm], Iterator[dict[str, Any]]]


def round_floats(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: round_floats(part) for key, part in value.items()}
    return [round_floats(part) for part in value] if isinstance(value, list | tuple) else value


class Result:
    """`numbers` is what a run has found so far. `file` None: it is not written."""

    def __init__(self, file: Path | None, seconds: float, shares: dict[str, float]) -> None:
        self.file, self.seconds, self.shares = file, seconds, shares
        self.numbers: dict[str, Any] = {"parts": {}, "skipped": []}
        self.last_save, self.spare_seconds = time.perf_counter(), 0.0

    def limit_of(self, part: str) -> float:
        """Seconds: the part's share, and what the ones before it have left over."""
        return self.seconds * self.shares[part] / sum(self.shares.values()) + self.spare_seconds

    def run(self, part: str, records: Records, sink: Callable[[dict[str, Any]], None]) -> None:
        """`sink` gets each record but {"skipped": …}. A part that takes longer than its limit is cut, and what failed leaves a sentence."""
        limit, clock_start, over_limit = self.limit_of(part), time.perf_counter(), False
        alarm = Alarm(limit)
        try:
            with alarm.set():
                for record in records(alarm):
                    with alarm.critical_section():
                        self.add(record, sink)
        except TimeLimit:
            over_limit = True
            self.numbers["skipped"].append(f"{part}: cut after {limit:.0f} s; what was measured until then is kept")
        except Exception as error:
            text = str(error).splitlines()
            self.numbers["skipped"].append(f"{part}: {type(error).__name__}: {text[0][:200] if text else 'no message'}")
        gc.collect()  # what a cut part held
        seconds = time.perf_counter() - clock_start
        self.spare_seconds = max(limit - seconds, 0.0)
        self.numbers["parts"][part] = {"seconds": seconds, "limit_s": limit, "over_limit": over_limit}
        self.save()

    def add(self, record: dict[str, Any], sink: Callable[[dict[str, Any]], None]) -> None:
        if set(record) == {"skipped"}:
            why = record["skipped"]
            sentences = self.numbers["skipped"]
            sentences += [sentence for sentence in ([why] if isinstance(why, str) else why) if sentence not in sentences]
        else:
            sink(record)
        if time.perf_counter() - self.last_save > WRITE_EVERY_S:
            self.save()

    @property
    def document(self) -> dict[str, Any]:
        env = self.numbers.get("env", {})
        return {key: env.get(key, "") for key in ("command", "commit", "device")} | {
            "versions": env.get("versions", {}),
            "numbers": round_floats(self.numbers),
        }

    def save(self) -> None:
        self.last_save = time.perf_counter()
        if self.file is not None:
            part = self.file.with_suffix(".part")  # a run that is killed leaves the last whole file
            part.write_text(json.dumps(self.document, indent=None, separators=(",", ":")) + "\n")
            part.replace(self.file)
