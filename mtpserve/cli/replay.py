"""`mtpserve replay`: run the steps that `--record-steps` wrote once more, and compare. Exit code 0 only when every result is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtpserve.cli.parser import Parser

if TYPE_CHECKING:
    from mtpserve.engine.replay import Replayed


def parser() -> Parser:
    made = Parser(
        prog="mtpserve replay", usage="%(prog)s FILE [options]",
        description="Run recorded steps once more and compare each result. Device, sizes and all other options are the recording's.",
    )  # fmt: skip
    made.add_argument("file", metavar="FILE", help="what --record-steps wrote")
    made.add_argument("--model", "--model-path", metavar="TEXT", help="where the model is here (default: where it was)")
    return made


def run(arguments: Sequence[str]) -> int:
    chosen = parser().parse(arguments)
    # Not at the top: torch comes with them.
    from mtpserve.engine.recording import Recording
    from mtpserve.engine.replay import config_of, replay
    from mtpserve.weights.hub import fetched

    recording = Recording(chosen.file)
    config = fetched(config_of(recording.header, chosen.model))
    found = replay(recording, config, progress=sys.stderr.isatty())
    print("\n".join(lines(found, f"{recording.header.model}, {recording.header.dtype} on {recording.header.device}")))
    return 0 if found.difference is None else 1


def lines(found: Replayed, where: str) -> list[str]:
    made = [f"replayed {found.steps} steps, {found.requests} requests, {found.tokens} tokens: {where}"]
    if found.raised:
        made.append(f"{found.raised} of the steps raised when they were recorded")
    if found.unread:
        made.append(f"{found.unread} of the steps had not been read when the recording ended")
    if found.truncated:
        made.append("the file ends in the middle of a step: what comes before was replayed")
    made.append("every result is the same" if found.difference is None else f"first difference: {found.difference}")
    return made
