"""`mtpserve inspect MODEL`: prints a checkpoint's architecture, weights and memory plan. Reads headers only,
not the weights. `mtpserve inspect DRAFT --model MODEL`: the same with a head or draft model that was
published apart, if the two fit together.

With `--token-map OUT.json` and text files it counts their tokens instead, and writes the most frequent, for
the smaller head.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mtpserve.cli.options import add_options, merge, parsed_values, settings
from mtpserve.cli.parser import Parser
from mtpserve.config import ENGINE_SECTIONS, EngineConfig
from mtpserve.core.arch.model import ModelArch
from mtpserve.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mtpserve.tools.inspect.checkpoint import InspectReport

TOKEN_MAP_SIZE = 32_768  # as in FR-Spec (https://arxiv.org/abs/2502.14856)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve inspect",
        usage="%(prog)s [MODEL] [options]\n       %(prog)s DRAFT --model MODEL [options]",
        description="Print a checkpoint's architecture, weights and memory plan.",
    )
    help = (
        "the same as --model. With --model: a head or draft model; the report says whether it fits "
        "the model, and has the memory plan for both"
    )
    arg_parser.add_argument("checkpoint", nargs="?", metavar="MODEL", help=help)
    arg_parser.add_argument(
        "texts",
        nargs="*",
        metavar="TEXTFILE",
        help="with --token-map: text files, similar to the texts that will be served",
    )
    arg_parser.add_argument(
        "--token-map",
        metavar="OUT.json",
        help="file to which the most frequent tokens of the text files are written",
    )
    arg_parser.add_argument(
        "--token-map-size",
        metavar="N",
        type=int,
        default=TOKEN_MAP_SIZE,
        help=f"number of tokens in that file (default: {TOKEN_MAP_SIZE})",
    )
    arg_parser.add_argument("--memory", action="store_true", help="print only the memory plan")
    arg_parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_options(arg_parser, ENGINE_SECTIONS)
    return arg_parser


def run(arguments: Sequence[str]) -> int:
    from mtpserve.weights.checkpoint.hf import read_config
    from mtpserve.weights.checkpoint.hub import fetched

    options = parser().parse(arguments)
    texts = list(options.texts)
    if options.token_map is not None and hasattr(options, "model") and options.checkpoint is not None:
        texts.insert(0, options.checkpoint)
        options.checkpoint = None
    draft = None
    if options.token_map is None and hasattr(options, "model"):
        draft, options.checkpoint = options.checkpoint, None
    values = parsed_values(options)
    if draft is not None:
        merge(values, {"speculative_draft_model_path": draft})
    with TemporaryDirectory(prefix="mtpserve-") as headers:
        # What counts tokens needs the tokenizer, and gets it from the hub's cache alone.
        scratch = Path(headers) if options.token_map is None else None
        engine = fetched(settings(values).engine, download=False, headers=scratch)
        if options.token_map is not None:
            write_token_map(engine, options.token_map, options.token_map_size, texts, options.json)
            return 0
        if texts:
            raise ConfigError(f"text files are counted with --token-map only, got {texts[0]!r}")
        read_config(engine.model.directory)  # before torch is imported, which takes seconds
        from mtpserve.tools.inspect.checkpoint import inspect_model

        report = inspect_model(engine)
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, memory_alone=options.memory)
    return 0


def write_token_map(engine: EngineConfig, out: str, size: int, texts: list[str], as_object: bool) -> None:
    """Counts the tokens, writes the map, and prints the share of the texts that it covers."""
    if not texts:
        raise ConfigError("--token-map needs text files to count tokens in")
    from mtpserve.tools.inspect.checkpoint import token_map

    hot_token_map = token_map(engine, size, texts)
    hot_token_map.write(out)
    if as_object:
        print(
            json.dumps(
                {
                    "file": out,
                    "tokens": len(hot_token_map.tokens),
                    "counted": hot_token_map.counted,
                    "distinct": hot_token_map.distinct,
                    "coverage": [{"tokens": n, "share": share} for n, share in hot_token_map.coverage],
                },
                indent=2,
            )
        )
        return
    console = terminal()
    table = plain(console, "coverage", "tokens in the map ", "share of the texts ", "")
    for n, share in hot_token_map.coverage:
        table.add_row(f"{n:,}", f"{share:.2%}", f"written to {out}" if n == size else "")
    console.print(table)
    console.print(
        f"note: {hot_token_map.counted:,} tokens counted, {hot_token_map.distinct:,} of them different"
    )


def show(report: InspectReport, memory_alone: bool) -> None:
    console = terminal()
    tables = (memory,) if memory_alone else (architecture, weights, memory)
    for table in tables:
        console.print(table(console, report))
    for note in report.notes:
        console.print(f"note: {note}")


def terminal() -> Console:
    """Returns a console: tables with rules on a terminal, plain columns that are not wrapped in a pipe."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 240
    return console


def plain(console: Console, title: str, *columns: str) -> Table:
    """A table. A column whose name ends in a blank holds numbers and is right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if console.is_terminal else None,
    )
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left")
    return table


def architecture(console: Console, report: InspectReport) -> Table:
    table = plain(console, "architecture", "field", "value")
    for name, value in [*flat(report.arch), *report.tensors]:
        table.add_row(name, value)
    return table


def flat(arch: ModelArch) -> list[tuple[str, str]]:
    """The fields in order; those of a part as `part.field`, an absent part as `-`; of layers each kind and
    how many there are."""
    rows: list[tuple[str, str]] = []

    def walk(prefix: str, value: object) -> None:
        if prefix.endswith("layers") and isinstance(value, tuple):
            rows.extend((prefix, f"{count} x {kind}") for kind, count in Counter(value).items())
        elif is_dataclass(value):
            for field in fields(value):
                walk(f"{prefix}.{field.name}" if prefix else field.name, getattr(value, field.name))
        else:
            rows.append((prefix, "-" if value is None else str(value)))

    walk("", arch)
    return rows


def weights(console: Console, report: InspectReport) -> Table:
    table = plain(console, "weights", "group", "tensors ", "parameters ", "dtype", "size ")
    for group, tensors, parameters, dtype, size in report.weights:
        table.add_row(group, f"{tensors:,}", f"{parameters:,}", dtype, human(size))
    tensors, parameters, size = (
        sum(column) for column in zip(*((row[1], row[2], row[4]) for row in report.weights), strict=True)
    )
    table.add_section()
    table.add_row("all", f"{tensors:,}", f"{parameters:,}", "", human(size))
    return table


def memory(console: Console, report: InspectReport) -> Table:
    table = plain(console, "memory", "what", "size ")
    for what, size in report.memory:
        table.add_row(what, human(size))
    table.add_section()
    table.add_row("all", human(sum(size for _, size in report.memory)))
    return table


def human(size: int) -> str:
    amount, unit = float(size), 0
    while amount >= 1024 and unit < len(UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{amount:.1f} {UNITS[unit]}"
