"""`mtpserve experts`: from what --record-expert-load counted to a file for --expert-map."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtpserve.cli.parser import Parser
from mtpserve.core.errors import ConfigError
from mtpserve.runtime.parallel.placement import balanced, imbalance, in_order

Loads = Mapping[int, Sequence[int]]  # by layer, how often each of its experts was chosen


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve experts", usage="%(prog)s FILE … --engines N --output FILE",
        description=(
            "Assign the experts of each layer to engines so that the engines have equal load. Print the "
            "balance of each layer, before and after: the busiest engine's load as a multiple of the "
            "mean."
        ),
    )  # fmt: skip
    arg_parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="files that --record-expert-load wrote, of all engines; their counts are added",
    )
    arg_parser.add_argument(
        "--engines", metavar="N", type=int, required=True,
        help=(
            "number of engine processes of the server that will read the file: --data-parallel-size "
            "times --tensor-parallel-size"
        ),
    )  # fmt: skip
    arg_parser.add_argument("--output", metavar="FILE", required=True, help="file to write, for --expert-map")
    return arg_parser


def run(arguments: Sequence[str]) -> int:
    options = parser().parse(arguments)
    loads, size = summed([loads_of(file) for file in options.files]), options.engines
    fewest = min(len(load) for load in loads.values())
    if not 2 <= size <= fewest:
        raise ConfigError(
            f"--engines must be in [2, {fewest}], so that each engine has an expert of each layer, got {size}"
        )
    owners = {layer: balanced(load, size) for layer, load in loads.items()}
    Path(options.output).write_text(json.dumps(owners) + "\n")
    print("\n".join(lines(loads, owners, size)))
    return 0


def loads_of(file: str) -> Loads:
    """Raises ConfigError."""
    try:
        loads = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    lists = (
        isinstance(loads, dict) and loads and all(isinstance(load, list) and load for load in loads.values())
    )
    if not lists or not all(
        name.isdecimal() and all(type(n) is int and n >= 0 for n in load) for name, load in loads.items()
    ):
        raise ConfigError(f"{file} must be a JSON object: for each layer the counts of its experts")
    return {int(name): load for name, load in loads.items()}


def summed(loads: Sequence[Loads]) -> Loads:
    """Raises ConfigError where they are of different models."""
    if (
        len({tuple((layer, len(load)) for layer, load in sorted(file_loads.items())) for file_loads in loads})
        > 1
    ):
        raise ConfigError("the files are of models with different layers or experts")
    return {
        layer: [sum(column) for column in zip(*(file_loads[layer] for file_loads in loads), strict=True)]
        for layer in sorted(loads[0])
    }


def lines(loads: Loads, owners: Mapping[int, Sequence[int]], size: int) -> list[str]:
    """A table, and its last line is that of the layer that is busiest after."""
    before = {layer: imbalance(load, in_order(len(load), size), size) for layer, load in loads.items()}
    after = {layer: imbalance(load, owners[layer], size) for layer, load in loads.items()}
    rows = [
        f"{layer:5} {sum(load):12} {before[layer]:8.2f} {after[layer]:8.2f}" for layer, load in loads.items()
    ]
    mean = [sum(ratios.values()) / len(ratios) for ratios in (before, after)]
    return [
        "layer       chosen   before    after",
        *rows,
        f"{'mean':>5} {'':12} {mean[0]:8.2f} {mean[1]:8.2f}",
    ]
