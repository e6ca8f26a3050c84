"""All drafters of one trunk, side by side: acceptance lengths of chains and trees, the time of drafting, and throughput against plain
decoding of the same requests in the same run (S), at several batch sizes and temperatures.

    python benchmarks/heads/compare.py --model demo --json benchmarks/results/drafters_demo.json

With --layers N the trunk gets further layers that change nothing (common/inflate.py): acceptance stays, and drafting costs little against
the trunk, as with larger models.

Drafters are what train_heads.py has written for the model, HEADS/MODEL-KIND, the model's own MTP layer, n-grams, and both. Each has an
engine of its own, in which its shapes and plain decoding take turns (as `mtpserve bench spec` does it). Prompts are held-out files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.inflate import Shape, inflate, opened
from common.record import save
from train_heads import TOKEN_MAP

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.config.spec import MAX_ROWS
from mtpserve.core.spec_sizes import SpecShape
from mtpserve.engine.startup.planning import describe
from mtpserve.tools.bench.spec.bench_spec import SpecGrid, config_of, measure, named
from mtpserve.tools.bench.spec.grid import PLAIN, SpecFigures, SpecLoad, as_row
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hub import fetched

ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "medusa": "MEDUSA", "dflash": "DFLASH", "standalone": "STANDALONE"}
WITH_NGRAMS = ("EAGLE3",)  # beside the model's own layer
TREES = ((3, 2, 6), (3, 4, 12), (5, 2, 10), (5, 4, 20))  # depth, topk, nodes
DEEPEST = 7


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    algorithm: str
    path: Path | None  # of the draft model; None: there is none, or the checkpoint's own layer
    parameters: int
    deepest: int = DEEPEST

    @property
    def options(self) -> dict[str, str]:
        made = {"speculative_algorithm": self.algorithm}
        if self.path is not None:
            made["speculative_draft_model_path"] = str(self.path)
            if (tokens := self.path / TOKEN_MAP).is_file():
                made["speculative_token_map"] = str(tokens)
        return made

    def shapes(self, depths: list[int]) -> list[SpecShape]:
        chains = [SpecShape(depth, 1, depth) for depth in depths if depth <= self.deepest]
        trees = [SpecShape(*tree) for tree in TREES if self.parameters and tree[0] <= min(self.deepest, max(depths)) and tree[2] < MAX_ROWS]
        return chains + trees


def numbers(checkpoint: Checkpoint, prefix: str = "") -> int:
    """Parameters, without copies of the trunk's embedding and head in an MTP layer."""
    copies = ("embed_tokens.weight", "shared_head.head.weight") if prefix else ()
    shapes = [
        each.shape for name, each in checkpoint.tensors.items() if name.startswith(prefix) and not name.endswith(copies) and each.is_real
    ]
    return sum(product_of(shape) for shape in shapes)


def product_of(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def arms(model: str, heads: Path) -> list[Arm]:
    """What there is for this model. n-grams need nothing."""
    described = describe(fetched(EngineConfig(model=ModelConfig(model=model))), want_mtp=False)
    found = list[Arm]()
    if described.layout is not None:
        own = sum(numbers(described.checkpoint, prefix) for prefix in described.layout.prefixes)
        found += [Arm(name, name, None, own) for name in ("MTP", "MTP+NGRAM")]
    for kind, algorithm in ALGORITHMS.items():
        path = heads / f"{Path(model).stem}-{kind}"
        if path.is_dir():
            count = json.loads((path / "config.json").read_text()).get("medusa_num_heads", DEEPEST)
            own, deepest = numbers(Checkpoint.open(path)), min(count, DEEPEST)
            names = [algorithm, f"{algorithm}+NGRAM"] if algorithm in WITH_NGRAMS else [algorithm]
            found += [Arm(name, name, path, own, deepest) for name in names]
    return [*found, Arm("NGRAM", "NGRAM", None, 0)]


@dataclass(frozen=True, slots=True)
class Row:
    """One drafter at one temperature."""

    arm: Arm
    temperature: float
    made: list[SpecFigures]

    def at(self, batch: int) -> list[SpecFigures]:
        return [each for each in self.made if each.load == SpecLoad(batch, self.temperature) and each.shape != PLAIN]

    def chains(self, batch: int) -> dict[int, SpecFigures]:
        return {each.shape.steps: each for each in self.at(batch) if each.shape.topk == 1}

    def longest(self, batch: int) -> SpecFigures:
        """The most tokens of a verification."""
        return max(self.at(batch), key=lambda each: each.accept_length)

    def fastest(self, batch: int) -> SpecFigures:
        return max(self.at(batch), key=lambda each: each.speedup)


def label(shape: SpecShape) -> str:
    return f"k = {shape.steps}" if shape.topk == 1 else f"{shape.steps}/{shape.topk}/{shape.nodes}"


def tables(rows: list[Row], depths: list[int], batches: list[int]) -> list[Table]:
    """Two for each temperature. Acceptance lengths are those of the largest batch: it has the most requests."""
    made, most, trees = list[Table](), max(batches), "trees as depth/topk/nodes"
    for temperature in sorted({row.temperature for row in rows}):
        lengths = Table("drafter", "parameters", *(f"k = {depth}" for depth in depths), "best", "of")
        speeds = Table("drafter", "drafting, ms", *(title for batch in batches for title in (f"S at {batch}", "of", "M")))
        lengths.title = f"acceptance lengths at T = {temperature:g}; {trees}"
        speeds.title = f"S at T = {temperature:g}, of the best shape; drafting at k = 3"
        for row in (row for row in rows if row.temperature == temperature):
            chains, longest, one = row.chains(most), row.longest(most), row.chains(min(batches)).get(3)
            each_length = [f"{chains[depth].accept_length:.2f}" if depth in chains else "-" for depth in depths]
            lengths.add_row(
                row.arm.name, f"{row.arm.parameters / 1e6:.2f} M", *each_length, f"{longest.accept_length:.2f}", label(longest.shape)
            )
            fastest = [row.fastest(batch) for batch in batches]
            cells = [cell for each in fastest for cell in (f"{each.speedup:.2f}", label(each.shape), f"{each.overhead:.2f}")]
            speeds.add_row(row.arm.name, "-" if one is None else f"{1000 * one.parts.get('draft', 0.0):.2f}", *cells)
        made += [lengths, speeds]
    return made


def words(rows: list[Row], batches: list[int]) -> list[str]:
    """What wins where."""
    said = list[str]()
    for temperature, batch in product(sorted({row.temperature for row in rows}), batches):
        some = [row for row in rows if row.temperature == temperature]
        first, *rest = sorted(((row.fastest(batch), row.arm.name) for row in some), key=lambda each: -each[0].speedup)
        where = f"T = {temperature:g}, {batch} request{'s' * (batch > 1)}: "
        if first[0].speedup < 1:
            said.append(f"{where}nothing is faster than plain decoding; the least slow is {first[1]}, {first[0].speedup:.2f} times it")
            continue
        second = f", before {rest[0][1]} with {rest[0][0].speedup:.2f}" if rest else ""
        slower = [name for figures, name in rest if figures.speedup < 1]
        lost = f"; slower than plain decoding in every shape: {', '.join(slower)}" if slower else ""
        said.append(f"{where}{first[1]} wins, {first[0].speedup:.2f} times plain decoding ({named(first[0].shape)}){second}{lost}")
        longest = max(some, key=lambda row: row.longest(batch).accept_length)
        if longest.arm.name != first[1]:
            figures = longest.longest(batch)
            accepted = f"{figures.accept_length:.2f} tokens a verification, {named(figures.shape)}"
            said.append(
                f"{where}{longest.arm.name} is accepted most ({accepted}), and is {longest.fastest(batch).speedup:.2f} times as fast"
            )
    return said


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--heads", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--drafters", nargs="+", help="by name, MTP+NGRAM or EAGLE3 (default: all that there are)")
    parser.add_argument("--depths", type=int, nargs="+", default=list(range(1, DEEPEST + 1)))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="of the trunk, at least those that it has")
    parser.add_argument("--json")
    args = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        if args.layers is None:
            compare(args, args.model, args.heads)
        else:
            compare(args, *deepened(args.model, args.heads, Path(folder), args.layers))


def deepened(model: str, heads: Path, folder: Path, layers: int) -> tuple[str, Path]:
    """The model, and its heads, of which DFlash's say how many layers it has. Their names stay, by which heads are found."""
    source, name = fetched(EngineConfig(model=ModelConfig(model=model))).model.directory, Path(model).stem
    inflate(source, folder / name, replace(Shape.of(opened(source).config.values), layers=layers))
    for head in heads.glob(f"{name}-*"):
        made = Path(shutil.copytree(head, folder / "heads" / head.name))
        config = json.loads((made / "config.json").read_text())
        if "num_target_layers" in config:
            (made / "config.json").write_text(json.dumps(config | {"num_target_layers": layers}))
    return str(folder / name), folder / "heads"


def compare(args: argparse.Namespace, model: str, heads: Path) -> None:
    loads = [SpecLoad(*each) for each in product(args.batches, args.temperatures)]
    there, rows, cells, different = arms(model, heads), list[Row](), list[dict[str, object]](), list[str]()
    for arm in there:
        if args.drafters and arm.name not in args.drafters:
            continue
        asked = SpecGrid(arm.shapes(args.depths), [], loads, 128, args.output, args.rounds, 0)
        made, _, _ = measure(asked, config_of(asked, {"model": model} | arm.options), None)
        rows += [Row(arm, temperature, made) for temperature in args.temperatures]
        cells += [{"drafter": arm.name, "parameters": arm.parameters} | as_row(each) for each in made]
        different += [
            f"{arm.name}, {named(each.shape)}: some greedy text is not plain decoding's" for each in made if each.same_text is False
        ]
        print(f"{arm.name}: measured", file=sys.stderr, flush=True)
    said = words(rows, args.batches) + different
    for table in tables(rows, args.depths, args.batches):
        Console(width=140).print(table)
    print(*said, sep="\n")
    save(
        args.json, {"model": args.model, "layers": args.layers, "output": args.output, "rounds": args.rounds, "cells": cells, "words": said}
    )


if __name__ == "__main__":
    main()
