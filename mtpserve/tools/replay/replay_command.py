"""`mtpserve replay`: run the steps that `--record-steps` wrote once more, and compare. Exit code 0 only when
every result is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtpserve.cli.parser import Parser

if TYPE_CHECKING:
    from mtpserve.tools.replay.replay import Replayed


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve replay", usage="%(prog)s FILE [options]",
        description=(
            "Run recorded steps again and compare each result. The recording has the device, the sizes "
            "and all other options."
        ),
    )  # fmt: skip
    arg_parser.add_argument("file", metavar="FILE", help="file that --record-steps wrote")
    arg_parser.add_argument(
        "--model",
        "--model-path",
        metavar="TEXT",
        help="path of the model on this machine (default: the recorded path)",
    )
    return arg_parser


def run(arguments: Sequence[str]) -> int:
    options = parser().parse(arguments)
    # Not at the top: torch comes with them.
    from mtpserve.engine.startup.recording import Recording
    from mtpserve.tools.replay.replay import config_of, replay
    from mtpserve.weights.checkpoint.hub import fetched

    recording = Recording(options.file)
    config = fetched(config_of(recording.header, options.model))
    outcome = replay(recording, config, progress=sys.stderr.isatty())
    print(
        "\n".join(
            lines(outcome, f"{recording.header.model}, {recording.header.dtype} on {recording.header.device}")
        )
    )
    return 0 if outcome.difference is None else 1


def lines(outcome: Replayed, where: str) -> list[str]:
    report = [
        f"replayed {outcome.steps} steps, {outcome.requests} requests, {outcome.tokens} tokens: {where}"
    ]
    if outcome.raised:
        report.append(f"{outcome.raised} of the steps raised when they were recorded")
    if outcome.unread:
        report.append(f"{outcome.unread} of the steps had not been read when the recording ended")
    if outcome.truncated:
        report.append("the file ends in the middle of a step: what comes before was replayed")
    report.append(
        "every result is the same"
        if outcome.difference is None
        else f"first difference: {outcome.difference}"
    )
    return report
