"""`mtpserve generate "prompt"`: one continuation in the terminal, coloured by where each token came from. The
engine runs in this process.

Standard output gets only the text, so that it can be piped; the summary goes to standard error.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtpserve.cli.options import Values, add_options, all_options, parsed_values, settings
from mtpserve.cli.paint import Painter
from mtpserve.cli.parser import Parser
from mtpserve.config import ENGINE_SECTIONS
from mtpserve.core.errors import ConfigError, InvalidRequest, quantity
from mtpserve.core.sampling import SamplingParams

if TYPE_CHECKING:
    from mtpserve.text.outputs import StreamStep

SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
MAX_TOKENS = 128


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve generate",
        usage="%(prog)s [PROMPT] [options]",
        description="Continue a prompt. Accepted drafts are green, rejected drafts are struck out.",
    )
    arg_parser.add_argument("prompt", nargs="?", help="text to continue (default: read from standard input)")
    arg_parser.add_argument(
        "--keep-rejected", action="store_true", help="keep rejected drafts in the text, struck out"
    )
    group = arg_parser.add_argument_group("sampling options")
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help=f"maximum number of tokens to generate (default: {MAX_TOKENS})",
    )
    group.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        help="sampling temperature; 0: greedy (default: the model's recommended value, or 1)",
    )
    group.add_argument(
        "--top-k", metavar="N", type=int, help="sample from the N likeliest tokens (default: all)"
    )
    group.add_argument(
        "--top-p",
        metavar="X",
        type=float,
        help="sample from the likeliest tokens whose probabilities sum to X",
    )
    group.add_argument(
        "--min-p",
        metavar="X",
        type=float,
        help="drop tokens whose probability is below X times that of the likeliest token",
    )
    group.add_argument("--seed", metavar="N", type=int, help="random seed; the same seed gives the same text")
    add_options(arg_parser, ENGINE_SECTIONS)
    return arg_parser


@dataclass(slots=True)
class Tally:
    """What the summary line counts."""

    tokens: int = 0
    verified: int = 0  # steps that had drafts
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, step: StreamStep) -> None:
        self.tokens += len(step.tokens)
        self.verified += bool(step.proposal.tokens)
        self.drafted += len(step.proposal.tokens)
        self.accepted += step.accepted

    def line(self) -> str:
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        parts = [f"{quantity(self.tokens, 'token')} in {self.seconds:.2f} s, {rate:.1f} tokens/s"]
        if self.verified:
            parts.append(
                f"{self.drafted} drafted, {self.accepted} accepted ({self.accepted / self.drafted:.0%})"
            )
            parts.append(f"accept length {1 + self.accepted / self.verified:.2f}")
        else:
            parts.append("nothing drafted")
        return " · ".join(parts)


def run(arguments: Sequence[str]) -> int:
    options = parser().parse(arguments)
    sampling = sampling_of(options)
    prompt = prompt_of(options)
    values = parsed_values(options)
    from mtpserve.weights.checkpoint.hub import require_names

    require_names(settings(values).engine)  # what cannot work fails here, before torch is imported
    from mtpserve.llm import LLM

    # a shared config file may contain the server's too
    names = {option.name for option in all_options(ENGINE_SECTIONS)}
    engine_options = {name: value for name, value in values.items() if name in names}
    with LLM(**engine_options) as llm:  # type: ignore[arg-type]
        tally = paint(prompt, llm.stream(prompt, llm.sampling(**sampling)), options.keep_rejected)
    print(tally.line(), file=sys.stderr)
    return 0


def sampling_of(options: Namespace) -> Values:
    """The given sampling parameters. Raises ConfigError for an invalid one."""
    values: Values = {"max_tokens": MAX_TOKENS}
    values |= {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    try:
        SamplingParams(**values)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise ConfigError(f"--{str(error.param).replace('_', '-')}: {error}") from error
    return values


def prompt_of(options: Namespace) -> str:
    if options.prompt is not None:
        return str(options.prompt)
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("generate needs a prompt: give it as an argument or on standard input")
    return sys.stdin.read()


def paint(prompt: str, steps: Iterable[StreamStep], keep: bool) -> Tally:
    from rich.console import Console

    painter, tally = Painter(Console(highlight=False, markup=False), keep), Tally()
    painter.prompt(prompt)
    start = time.perf_counter()
    try:
        for step in steps:
            tally.add(step)
            painter.step(step.accepted_pieces, step.own_piece, step.rejected_pieces)
            tally.seconds = time.perf_counter() - start
    finally:
        painter.end()
    return tally
