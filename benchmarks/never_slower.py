"""Throughput with depths chosen while serving, against plain decoding and fixed depths: in turns, at a constant number of requests.

python benchmarks/never_slower.py --json FILE

The demo, and the demo inflated to some hundred million parameters (common/inflate.py), which answers the same. `untrained` is that with a
random projection in its draft layer, which guesses next to nothing. MODEL+ALGORITHM, like smollm2+EAGLE3, is a model with the head that
heads/train_heads.py has written for it.

Each arm has two engines, which are made in the order of the arms and then in the opposite one: of two equal engines the first one has been
4 % faster. More of them, `--engines 4`, tell differences of a percent. One is for GPUs, where memory does not differ so.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from common.demo import prompts
from common.huge_pages import on_huge_pages
from common.inflate import Shape, inflate, opened
from common.record import save
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.start import try_out
from mtpserve.weights.checkpoint.hub import fetched

DEPTH, TOKENS, PROMPT = 3, 128, 128
SLICE_S = 0.25  # plain decoding's turn: what slows the machine down for seconds slows all arms down. Slow steps need longer ones
RESAMPLED = 1000  # times, for the spread of a ratio
# As many layers as MiMo-7B has, the smallest of the published models with a draft layer: what drafting costs, it costs relative to them.
LARGE = {"layers": 36, "hidden": 1024, "heads": 8, "kv_heads": 8, "experts": 32, "experts_per_token": 4}
INFLATED = ("demo", "large", "untrained")
HEADS = Path(__file__).parent / "heads" / "checkpoints"


def arms(fixed: Sequence[int], **drafter: str) -> dict[str, SpecConfig]:
    """`fixed`: depths. `drafter`: options of SpecConfig."""
    options: dict[str, Any] = drafter or {"speculative_algorithm": "NEXTN"}
    depths = {f"k = {k}": SpecConfig(speculative_num_steps=k, speculative_adaptive=False, **options) for k in sorted(fixed)}
    return {"plain": SpecConfig(speculative_algorithm="none"), **depths, "adaptive": SpecConfig(speculative_num_steps=DEPTH, **options)}


Arms = list[tuple[str, Engine]]  # as many of each


def arms_of(model: str, algorithm: str, fixed: Sequence[int]) -> dict[str, SpecConfig]:
    """With the head that was trained for it."""
    if not algorithm:
        return arms(fixed)
    head = HEADS / f"{model}-{algorithm.lower()}"
    if not head.is_dir():
        raise SystemExit(f"{head} is not there: heads/train_heads.py writes it")
    options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(head)}
    if (tokens := head / "token_map.json").is_file():
        options["speculative_token_map"] = str(tokens)
    return arms(fixed, **options)


def large(folder: Path) -> Path:
    """The demo's text at the cost of a larger model."""
    source = ModelConfig().directory
    inflate(source, folder / "large", replace(Shape.of(opened(source).config.values), **LARGE))
    return folder / "large"


def untrained(model: Path, folder: Path) -> Path:
    """Its draft layer's input is a random projection of what it should be."""
    made = folder / "untrained"
    shutil.copytree(model, made)
    found = 0
    for file in made.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("eh_proj.weight"):
                generator, found = torch.Generator().manual_seed(0), found + 1
                tensors[name] = (torch.randn(tensor.shape, generator=generator) * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    if not found:
        raise SystemExit(f"{model} has no eh_proj")
    return made


def engine_of(model: Path, spec: SpecConfig, most: int) -> Engine:
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model=str(model)),
            # Each run computes its prompts, as the first one does.
            cache=CacheConfig(max_total_tokens=most * (PROMPT + 3 * TOKENS // 2 + 32), disable_radix_cache=True),
            scheduler=SchedulerConfig(max_running_requests=most),
            spec=spec,
        )
    )
    try_out(engine)
    return engine


class Turn(NamedTuple):
    tokens: int
    prompts: int  # tokens of prompts that were computed
    seconds: float


class Load:
    """As many requests at a time as are asked for: when one ends, the next one starts. All arms get the same ones in the same order.

    The first ones are as if they had begun long ago, with more and more of their tokens left, so that prompts come at the same rate from
    the first turn to the last. Were all at their beginning, they would come in waves.
    """

    def __init__(self, engine: Engine, requests: int, temperature: float, model: str = "demo") -> None:
        """`model`: whose tokenizer makes the prompts."""
        self.engine, self.requests, self.temperature = engine, requests, temperature
        self.prompts, self.started, self.ended = prompts(16, model), 0, 0
        self.tokens = 0  # in all

    def start(self) -> None:
        number, self.started = self.started, self.started + 1
        # They differ in length, so that they do not end together.
        tokens = TOKENS // 2 + 37 * number % TOKENS
        if number < self.requests:
            tokens = max(tokens * (number + 1) // self.requests, 1)
        # No seeds: a seeded request's drafts are coupled to its noise while depths are chosen, and fewer of them are accepted.
        params = SamplingParams(max_tokens=tokens, temperature=self.temperature, ignore_eos=True)
        self.engine.add(Request(str(number), self.prompts[number % len(self.prompts)], params))

    def fill(self) -> None:
        """Until so many requests have been admitted, since the prompts of many take longer than some turns; or until as many have ended,
        where drafts leave prompts little of a step's rows."""
        self.step()
        while self.engine.stats.waiting and self.ended < self.requests:
            self.step()

    def run(self, seconds: float) -> Turn:
        """At least so long."""
        began = time.perf_counter()
        return self.turn(lambda: time.perf_counter() - began < seconds)

    def until(self, tokens: float) -> Turn:
        """Until there are so many tokens in all."""
        return self.turn(lambda: self.tokens < tokens)

    def turn(self, more: Callable[[], bool]) -> Turn:
        began, tokens, prompts = time.perf_counter(), self.tokens, self.computed
        while more():
            self.step()
        return Turn(self.tokens - tokens, self.computed - prompts, time.perf_counter() - began)

    @property
    def computed(self) -> int:
        """Tokens of prompts."""
        return self.engine.stats.step_tokens_total - self.engine.stats.generation_tokens_total

    def step(self) -> None:
        while self.started - self.ended < self.requests:
            self.start()
        events = self.engine.step()
        self.ended += sum(event.finish is not None for event in events)
        self.tokens += sum(len(event.tokens) for event in events)

    def end(self) -> None:
        for number in range(self.started):
            self.engine.abort(str(number))
        while self.engine.has_work:
            self.engine.step()


@dataclass(frozen=True, slots=True)
class Row:
    """One model, number of requests and temperature. `tokens_per_s`: as if all arms had computed as many prompts (see `evened`). `least`,
    `most`: the quartiles of `against_plain` when turns are drawn again. `best`: of the arms with a fixed depth."""

    model: str
    requests: int
    temperature: float
    accept_length: float | None  # of the deepest fixed arm
    tokens_per_s: dict[str, float]
    against_plain: float
    least: float
    most: float
    best: str | None
    against_best: float | None
    depths: list[int]  # the adaptive arm's steps by depth
    engines: dict[str, list[float]]  # tokens per second of each: equal ones differ


def measured(
    model: str, engines: Arms, requests: int, temperature: float, turns: int, *, seconds: float = SLICE_S, texts: str = "demo"
) -> Row:
    """All engines have their requests open, always as many, admitted before the first of the short turns that they step in. A turn is as
    many tokens as plain decoding yields in `seconds` while the engines warm up, and begins with the same token in all arms."""
    loads = [(name, Load(engine, requests, temperature, texts)) for name, engine in engines]
    turned: list[list[Turn]] = [[] for _ in loads]
    for _, load in loads:
        load.fill()
    names = list(dict.fromkeys(name for name, _ in engines))
    fixed, both = [name for name in names if name.startswith("k")], list(zip(loads, turned, strict=True))
    rounds = -(-turns * len(names) // len(engines))
    warmed = [(name, load.run(seconds * max(rounds // 10, 1))) for name, load in loads]
    plain = [turn for name, turn in warmed if name == "plain"]
    work = seconds * sum(turn.tokens for turn in plain) / sum(turn.seconds for turn in plain)
    begin = max(load.tokens for _, load in loads)
    for _, load in loads:
        load.until(begin)
    before, steps = accept_lengths(engines, fixed[-1:]), steps_per_depth(engines)
    for number in range(rounds):
        for (_, load), own in both if number % 2 else reversed(both):
            own.append(load.until(begin + (number + 1) * work))
    for _, load in loads:
        load.end()
    alike = evened([turn for (name, _), own in both if name == "plain" for turn in own])
    found = {arm: [alike(turn) for (name, _), own in both if name == arm for turn in own] for arm in names}
    each = {arm: [rate(list(map(alike, own))) for (name, _), own in both if name == arm] for arm in names}
    rates = {arm: rate(of) for arm, of in found.items()}
    depths = [now - then for now, then in zip(steps_per_depth(engines), steps, strict=True)]
    length = best = against = None
    if fixed:
        best = max(fixed, key=rates.__getitem__)
        against = rates["adaptive"] / rates[best]
        counts = [now - then for now, then in zip(accept_lengths(engines, fixed[-1:]), before, strict=True)]
        length = sum((n + 1) * count for n, count in enumerate(counts)) / max(1, sum(counts))
    least, most = spread(found["adaptive"], found["plain"])
    return Row(
        model, requests, temperature, length, rates, rates["adaptive"] / rates["plain"], least, most, best, against, depths, each
    )  # fmt: skip


def accept_lengths(engines: Arms, of: Sequence[str]) -> list[int]:
    return added(engine.stats.accept_lengths for name, engine in engines if name in of)


def steps_per_depth(engines: Arms) -> list[int]:
    """Of the adaptive arm."""
    return added(engine.stats.steps_per_depth for name, engine in engines if name == "adaptive")


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip(*counts, strict=True)]


def evened(plain: list[Turn]) -> Callable[[Turn], tuple[int, float]]:
    """From a turn to its tokens and seconds, as if it had computed as many prompts per token as plain decoding's have on average.

    When arms have the same tokens, one may have begun a prompt that another has not, alike in all of its engines: with 128 requests that is
    0.4 % of 25 seconds. What a prompt's token takes is told from the turns, which have more and fewer of them (least squares)."""
    work = torch.tensor([[turn.tokens, turn.prompts] for turn in plain], dtype=torch.float64)
    seconds = torch.tensor([[turn.seconds] for turn in plain], dtype=torch.float64)
    takes = float(torch.linalg.lstsq(work, seconds, driver="gelsd").solution[1])
    tokens, prompts = work.sum(0).tolist()
    return lambda turn: (turn.tokens, turn.seconds - takes * (turn.prompts - prompts / tokens * turn.tokens))


def rate(turns: list[tuple[int, float]]) -> float:
    """Tokens per second."""
    return sum(tokens for tokens, _ in turns) / sum(took for _, took in turns)


def spread(turns: list[tuple[int, float]], others: list[tuple[int, float]]) -> tuple[float, float]:
    """Quartiles of the ratio of two arms' rates, by the bootstrap."""
    random, both = Random(0), list(zip(turns, others, strict=True))
    drawn = (random.choices(both, k=len(both)) for _ in range(RESAMPLED))
    ratios = sorted(rate([a for a, _ in some]) / rate([b for _, b in some]) for some in drawn)
    return ratios[RESAMPLED // 4], ratios[3 * RESAMPLED // 4]


def main() -> None:
    on_huge_pages()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(INFLATED))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--turns", type=int, default=60, help="of each arm, for each cell")
    parser.add_argument("--turn-seconds", type=float, default=SLICE_S)
    parser.add_argument("--engines", type=int, default=2, help="of each arm")
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, DEPTH], help="depths of the fixed arms; none: plain decoding alone")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.engines < 1:
        parser.error(f"--engines must be at least 1, got {args.engines}")
    if not all(0 < depth <= DEPTH for depth in args.fixed):
        parser.error(f"--fixed must be in [1, {DEPTH}], got {args.fixed}")
    names = list(arms(args.fixed))
    table, rows = Table("model", "requests", "T", "accept length", *names, "adaptive / plain", "adaptive / best k"), list[Row]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inflated = large(folder) if {"large", "untrained"} & set(args.models) else None
        for model in args.models:
            base, _, algorithm = model.partition("+")
            if not algorithm and model not in INFLATED:
                raise SystemExit(f"--models must be of {', '.join(INFLATED)} or like smollm2+EAGLE3, got {model}")
            named = fetched(EngineConfig(model=ModelConfig(model=base))).model if algorithm else ModelConfig()
            path = named.directory if inflated is None or model not in ("large", "untrained") else inflated
            path = untrained(path, folder) if model == "untrained" else path
            made = list(arms_of(base, algorithm, args.fixed).items())
            orders = [made[:: 1 - 2 * (number % 2)] for number in range(args.engines)]
            engines = [(arm, engine_of(path, spec, max(args.requests))) for order in orders for arm, spec in order]
            gc.collect()
            gc.freeze()  # as an engine's process does: otherwise each arm's garbage is looked for among the models of all of them
            for requests, temperature in product(args.requests, args.temperatures):
                row = measured(model, engines, requests, temperature, args.turns, seconds=args.turn_seconds, texts=str(named.directory))
                rows.append(row)
                best = "" if row.against_best is None else f", {row.against_best:.2f} x {row.best}"
                found = f"{row.against_plain:.3f} x plain{best}; steps by depth {row.depths}"
                print(f"{model}, {requests} requests, T = {temperature}: {found}", file=sys.stderr, flush=True)
                save(
                    args.json,
                    {"tokens": TOKENS, "turns": args.turns, "turn_seconds": args.turn_seconds, "rows": [asdict(row) for row in rows]},
                )
            engines.clear()  # two models' do not fit
            gc.unfreeze()
            gc.collect()
    for row in rows:
        speeds = (f"{row.tokens_per_s[arm]:.0f}" for arm in names)
        length, best = ("" if value is None else f"{value:.2f}" for value in (row.accept_length, row.against_best))
        against = f"{row.against_plain:.2f} ({row.least:.2f} to {row.most:.2f})"
        table.add_row(row.model, str(row.requests), str(row.temperature), length, *speeds, against, best)
    Console().print(table)


if __name__ == "__main__":
    main()
