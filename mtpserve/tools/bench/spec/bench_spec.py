"""`mtpserve bench spec`: what drafts of several shapes give on this machine, in one engine without a restart,
and the best of them for each number of requests. Depths, branches, nodes, batch sizes and temperatures are
combined; grid.py says what the numbers mean."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from mtpserve.cli.options import Values, add_options, parsed_values, settings
from mtpserve.cli.parser import Parser
from mtpserve.config import ENGINE_SECTIONS, EngineConfig
from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError, quantity
from mtpserve.core.spec_sizes import SpecShape
from mtpserve.tools.bench.spec import grid
from mtpserve.tools.bench.spec.grid import PARTS, PLAIN, SpecFigures, SpecLoad

if TYPE_CHECKING:
    from mtpserve.llm import LLM
    from mtpserve.text.tokenizer import Tokenizer

# The server's options that a measurement knows. A --config file is read for these alone.
KNOWN = (
    "model", "tokenizer", "revision", "download_dir", "load_format", "dtype", "quantization", "device",
    "attention_backend",
    "context_length", "page_size", "max_total_tokens", "mem_fraction_static", "kv_cache_dtype",
    "chunked_prefill_size",
    "disable_cuda_graph", "disable_overlap_schedule", "cuda_graph_max_bs", "cpu_threads", "cpu_affinity",
    "speculative_algorithm",
    "speculative_draft_model_path", "speculative_draft_model_quantization", "speculative_token_map",
    "speculative_exact",
    "speculative_synthetic_acceptance",
)  # fmt: skip
SECTIONS = {name: config for name, config in ENGINE_SECTIONS.items() if name != "sampling"}
AHEAD = 4  # steps that the first request of a batch may be ahead of the last, and those in flight
HELD_OUT = 13  # 13 of 256 files of Python's library, which the demo model has not seen


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve bench spec",
        usage="%(prog)s [--model MODEL] [--num-steps N,N,...] [--eagle-topk N,N,...] [--batch-sizes "
        "N,N,...] [options]",
        description=(
            "Measure draft settings in one engine: acceptance, step times, and the speed-up over "
            "decoding without drafts. Print the best setting for each load."
        ),
    )
    what = arg_parser.add_argument_group("compared settings, in all combinations")
    what.add_argument(
        "--num-steps",
        metavar="N,N,...",
        default="1,2,3",
        help="drafts in a row, 1 to 7 (default: 1,2,3)",
    )
    what.add_argument(
        "--eagle-topk",
        metavar="N,N,...",
        default="1",
        help="branches per draft step, 1 to 8; 1: a chain (default: 1)",
    )
    rows = "rows of a tree: drafts + 1 (default: num-steps * topk + 1, for a chain always num-steps + 1)"
    what.add_argument("--num-draft-tokens", metavar="N,N,...", help=rows)
    what.add_argument(
        "--batch-sizes",
        metavar="N,N,...",
        default="1,4,16",
        help="requests at once (default: 1,4,16)",
    )
    what.add_argument(
        "--temperatures", metavar="X,X,...", default="0", help="sampling temperatures; 0: greedy (default: 0)"
    )
    add_requests(arg_parser.add_argument_group("requests"))
    arg_parser.add_argument("--output-file", metavar="FILE", help="file for the results, as JSON")
    add_options(arg_parser, SECTIONS, KNOWN)
    return arg_parser


def add_requests(group: Any) -> None:
    group.add_argument(
        "--input-len", metavar="N", type=int, default=128, help="tokens of a prompt (default: 128)"
    )
    group.add_argument(
        "--output-len",
        metavar="N",
        type=int,
        default=64,
        help="tokens of an answer (default: 64)",
    )
    group.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=5,
        help="measurements of each setting; the report has the median times (default: 5)",
    )
    source = (
        'prompts, one object with "prompt" per line (default: source files of Python\'s library that '
        "the demo model has not seen)"
    )
    group.add_argument("--prompts", metavar="FILE", help=source)
    group.add_argument(
        "--seed", metavar="N", type=int, default=0, help="random seed of the sampling (default: 0)"
    )


@dataclass(frozen=True, slots=True)
class SpecGrid:
    """What is measured, as asked."""

    shapes: list[SpecShape]
    skipped: list[str]
    loads: list[SpecLoad]
    input: int
    output: int
    rounds: int
    seed: int

    @property
    def largest(self) -> SpecShape:
        return grid.largest(self.shapes)

    @property
    def batch(self) -> int:
        return max(load.batch for load in self.loads)

    def room(self, page: int, budget: int) -> int:
        """Tokens that the first request of a batch may get while the others' prompts end, and what a window's
        last step may add."""
        return (AHEAD + self.batch * (page + 1) // budget) * (self.largest.steps + 1)


def run(arguments: Sequence[str]) -> int:
    options = parser().parse(arguments)
    spec_grid, values = asked_of(options), parsed_values(options)
    config = config_of(spec_grid, {name: value for name, value in values.items() if name in KNOWN})
    texts = None if options.prompts is None else read_prompts(options.prompts)
    figures, notes, algorithm = measure(spec_grid, config, texts)
    config |= {"speculative_algorithm": algorithm}
    show(spec_grid, figures, notes, algorithm)
    if options.output_file is not None:
        write(options.output_file, as_json(spec_grid, figures, notes, config))
    return 0


def asked_of(options: Any) -> SpecGrid:
    for name, least in (("input_len", 1), ("output_len", 8), ("rounds", 1)):
        check((value := getattr(options, name)) >= least, name, value, f"at least {least}")
    check(0 <= options.seed < 1 << 62, "seed", options.seed, "at least 0")
    steps, topks = (
        numbers("num_steps", options.num_steps, 1, 7),
        numbers("eagle_topk", options.eagle_topk, 1, 8),
    )
    rows = (
        None
        if options.num_draft_tokens is None
        else numbers("num_draft_tokens", options.num_draft_tokens, 2, 1 << 16)
    )
    shapes, skipped = grid.shapes(steps, topks, rows)
    loads = [
        SpecLoad(*pair)
        for pair in product(
            numbers("batch_sizes", options.batch_sizes, 1, 1 << 16), temperatures(options.temperatures)
        )
    ]
    return SpecGrid(
        shapes, skipped, loads, options.input_len, options.output_len, options.rounds, options.seed
    )


def numbers(name: str, text: str, least: int, limit: int) -> list[int]:
    parts = [piece.strip() for piece in text.split(",")]
    good = all(piece.isdecimal() and least <= int(piece) <= limit for piece in parts)
    check(good, name, text, f"whole numbers from {least} to {limit} with commas between them")
    return sorted({int(piece) for piece in parts})


def temperatures(text: str) -> list[float]:
    try:
        values = [float(piece) for piece in text.split(",")]
    except ValueError:
        values = [-1.0]
    check(
        all(math.isfinite(value) and 0 <= value <= 100 for value in values),
        "temperatures",
        text,
        "numbers from 0 to 100",
    )
    return sorted(set(values))


def config_of(spec_grid: SpecGrid, values: Values) -> Values:
    """Options of an engine that can draft in all shapes, for the largest batch."""
    batch, shape = spec_grid.batch, spec_grid.largest
    options: Values = values | grid.options(shape)
    options |= {"speculative_adaptive": False, "max_running_requests": batch}
    # A prompt's last page is computed by each request: all of them in one step, where that can be.
    options.setdefault("chunked_prefill_size", max(512, batch * (shape.nodes + 10)))
    config = settings(options).engine
    longest, page = longest_of(spec_grid, config), config.cache.page_size
    options.setdefault(
        "max_total_tokens", (batch + 1) * (longest + 4 * (shape.nodes + shape.topk * shape.steps + page + 10))
    )
    options["schedule_conservativeness"] = 0.0
    settings(options)  # what the options rule out is said before anything loads
    return options


def longest_of(spec_grid: SpecGrid, config: EngineConfig) -> int:
    """Tokens of a request."""
    return (
        spec_grid.input
        + spec_grid.output
        + spec_grid.room(config.cache.page_size, config.scheduler.step_tokens)
    )


def measure(
    spec_grid: SpecGrid, values: Values, texts: Sequence[str] | None
) -> tuple[list[SpecFigures], list[str], str]:
    """→ figures, plain decoding's among them, what is to be noted, and what drafts, as
    --speculative-algorithm names it."""
    from mtpserve.llm import LLM
    from mtpserve.tools.bench.spec.measure import SpecBench

    options: dict[str, Any] = dict(values)
    with LLM(**options) as llm:
        longest = longest_of(spec_grid, llm.config)
        if longest > llm.engine.context_length:
            raise ConfigError(
                f"--input-len and --output-len need {longest} tokens with drafts, the context has "
                f"{llm.engine.context_length}"
            )
        clock = clock_of(llm)
        room = longest - spec_grid.input - spec_grid.output
        bench = SpecBench(
            llm.engine, prompts_of(spec_grid, llm, texts), spec_grid.output, room, spec_grid.seed, clock
        )
        shapes = [PLAIN, *spec_grid.shapes]
        with progress(len(shapes) * len(spec_grid.loads) * spec_grid.rounds) as done:
            windows = bench.run(shapes, spec_grid.loads, spec_grid.rounds, done)
        lots = llm.engine.card.synthetic_acceptance is not None
        figures = [
            grid.figures(shape, load, windows[shape, load], windows[PLAIN, load],
                lots) for load in spec_grid.loads for shape in shapes
        ]  # fmt: skip
        return figures, notes_of(spec_grid, llm, figures, clock is not None), str(llm.engine.card.algorithm)


def clock_of(llm: LLM) -> Any:
    """Returns the clock of a step's parts; None if steps are captured: their parts cannot be told apart."""
    from mtpserve.runtime.graphs.parts import PartClock
    from mtpserve.runtime.runner import Runner

    runner = llm.engine.runner
    if not isinstance(runner, Runner) or runner.graphs is not None:
        return None
    runner.step.mark = clock = PartClock(runner.req_tensors.device)
    return clock


def notes_of(spec_grid: SpecGrid, llm: LLM, figures: Sequence[SpecFigures], parts: bool) -> list[str]:
    notes = [f"skipped: {line}" for line in spec_grid.skipped]
    if curve := llm.engine.card.synthetic_acceptance:
        notes.append(f"SYNTHETIC ACCEPTANCE by the curve {curve}: AL is the curve's, not the model's")
    if not parts:
        notes.append(
            "steps are captured, and a captured step has no parts; --disable-cuda-graph measures them"
        )
    if differing := sum(cell.same_text is False for cell in figures):
        notes.append(
            f"in {differing} rows some greedy text is not plain decoding's, by rounding or by a "
            f"defect: `mtpserve prove` tells which"
        )
    return notes


def prompts_of(spec_grid: SpecGrid, llm: LLM, texts: Sequence[str] | None) -> list[list[int]]:
    count = spec_grid.batch * spec_grid.rounds
    if llm.config.model.numbers_for_text and texts is None:
        random = Random(spec_grid.seed)
        return [
            [random.randrange(llm.engine.card.vocab) for _ in range(spec_grid.input)] for _ in range(count)
        ]
    if texts is None:
        return library_prompts(llm.tokenizer, spec_grid.input, count)
    return [llm.tokenizer.encode(text)[: spec_grid.input] for text in texts]


def read_prompts(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file}: {getattr(error, 'strerror', None) or error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line) if line.strip() else {"prompt": None}
        except ValueError as error:
            raise ConfigError(f"--prompts {file}, line {number}: is not JSON: {error}") from error
        text = value.get("prompt") if isinstance(value, dict) else None
        if line.strip() and (not isinstance(text, str) or not text):
            raise ConfigError(f'--prompts {file}, line {number}: must be an object with a text as "prompt"')
        prompts += [text] if isinstance(text, str) else []
    if not prompts:
        raise ConfigError(f"--prompts {file}: no prompt in it")
    return prompts


def library_prompts(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """Beginnings of files of Python's own library, then what comes later in them. All from files that are
    held out of the demo model's training, by a hash of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path for path in root.rglob("*.py") if "-packages" not in str(path.relative_to(root)))
    files = [
        path for path in names if hashlib.sha256(str(path.relative_to(root)).encode()).digest()[0] < HELD_OUT
    ]
    prompts: list[list[int]] = []
    rest = [tokenizer.encode(path.read_text("utf-8", errors="ignore")[: 64 * length]) for path in files]
    while len(prompts) < count and (rest := [ids for ids in rest if len(ids) >= 2 * length]):
        prompts += [ids[:length] for ids in rest]
        rest = [ids[2 * length :] for ids in rest]
    if not prompts:
        raise ConfigError(
            f"--input-len {length}: no file of Python's library on this machine is that long; see --prompts"
        )
    return prompts[:count]


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """Shows the progress on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def show(spec_grid: SpecGrid, figures: Sequence[SpecFigures], notes: Sequence[str], algorithm: str) -> None:
    from mtpserve.tools.inspect.inspect_command import plain, terminal

    console = terminal()
    first = ("batch ", "temperature ", "drafts", "AL ", "step ms ")
    columns = (*first, *(f"{stage} " for stage in PARTS), "tok/s ", "S ", "M ")
    rounds = quantity(spec_grid.rounds, "round")
    title = f"prompts of {spec_grid.input} tokens, answers of {spec_grid.output}, {rounds}"
    table = plain(console, title, *columns)
    for cell in figures:
        parts = [f"{1000 * cell.parts[stage]:.2f}" if cell.parts else "-" for stage in PARTS]
        row = [
            str(cell.load.batch),
            f"{cell.load.temperature:g}",
            named(cell.shape),
            f"{cell.accept_length:.2f}",
            f"{1000 * cell.step:.2f}",
        ]
        table.add_row(
            *row, *parts, f"{cell.tokens_per_second:,.0f}", f"{cell.speedup:.2f}", f"{cell.overhead:.2f}"
        )
    console.print(table)
    for load in spec_grid.loads:
        console.print(f"best for {loaded(load)}: {advice(figures, load, algorithm)}", soft_wrap=True)
    for line in notes:
        console.print(f"note: {line}", soft_wrap=True)


def named(shape: SpecShape) -> str:
    if shape == PLAIN:
        return "plain"
    return (
        f"chain {shape.steps}"
        if shape.topk == 1
        else f"tree {shape.steps} deep, topk {shape.topk}, {shape.nodes} nodes"
    )


def loaded(load: SpecLoad) -> str:
    return f"{load.batch} request{'s' * (load.batch > 1)} at temperature {load.temperature:g}"


def advice(figures: Sequence[SpecFigures], load: SpecLoad, algorithm: str) -> str:
    drafted = [cell for cell in figures if cell.shape != PLAIN]
    best_cell = grid.best(drafted, load)
    if best_cell is None:
        return "--speculative-algorithm none: plain decoding is faster than all of these"
    return f"{grid.line(algorithm, best_cell.shape)}   ({best_cell.speedup:.2f} times plain decoding)"


def as_json(
    spec_grid: SpecGrid, figures: Sequence[SpecFigures], notes: Sequence[str], config: Values
) -> dict[str, Any]:
    algorithm = str(config["speculative_algorithm"])
    best_cells = {
        load: grid.best([cell for cell in figures if cell.shape != PLAIN], load) for load in spec_grid.loads
    }
    return {
        "engine": {name: value for name, value in sorted(config.items()) if name in KNOWN},
        "input_len": spec_grid.input,
        "output_len": spec_grid.output,
        "rounds": spec_grid.rounds,
        "seed": spec_grid.seed,
        "cells": [grid.as_row(cell) for cell in figures],
        "best": [
            {"batch_size": load.batch, "temperature": load.temperature,
                "speedup": None if one is None else round(one.speedup, 4),
             "options": None if one is None else grid.line(algorithm, one.shape)}
            for load, one in best_cells.items()
        ],
        "notes": list(notes),
    }  # fmt: skip


def write(file: str, results: dict[str, Any]) -> None:
    try:
        Path(file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-file {file}: {error.strerror}") from error
