"""What adapters cost: milliseconds of a decoding step in which no request has an adapter, all have the same one, or several take turns.

python benchmarks/lora.py --model CHECKPOINT --requests 16 --adapters 0 1 4 16 --ranks 16 64 --drafts 0 3

The adapters are random, for all linear layers that take one, and are written to a temporary directory. One engine for each rank and number
of drafts; the numbers of adapters are measured in turn, round by round, so that a busy machine hits all of them. `--dry-run`: a few steps,
to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from common.record import save
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from mtpserve.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.weights.checkpoint.checkpoint import Checkpoint

ADAPTED = re.compile(r"(model\.layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj))\.weight")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def write_adapters(model: ModelConfig, layers: int, rank: int, count: int, folder: Path) -> list[LoRARequest]:
    """Random ones for the trunk's `layers`, small enough that the text stays a text."""
    shapes = {
        match[1]: entry.shape for name, entry in Checkpoint.open(model.directory).tensors.items() if (match := ADAPTED.fullmatch(name))
    }
    shapes = {name: shape for name, shape in shapes.items() if int(name.split(".")[2]) < layers}
    assert shapes, f"{model.directory} has no linear layer that takes an adapter"
    requests = []
    for number in range(1, count + 1):
        dice, sides = torch.Generator().manual_seed(number), {}
        for name, (outputs, inputs) in shapes.items():
            sides[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=dice) / inputs**0.5
            sides[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=dice) / (64 * rank**0.5)
        place = folder / f"{rank}-{number}"
        place.mkdir()
        save_file(sides, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
        requests.append(LoRARequest(place.name, number, str(place)))
    return requests


def engine_of(model: ModelConfig, drafts: int, rank: int, slots: int, requests: int, context: int) -> Engine:
    fixed = SpecConfig(speculative_algorithm="MTP", speculative_adaptive=False, speculative_num_steps=drafts)
    return build_engine(
        EngineConfig(
            model=model,
            cache=CacheConfig(max_total_tokens=requests * context),
            spec=fixed if drafts else SpecConfig(speculative_algorithm="none"),
            scheduler=SchedulerConfig(max_running_requests=requests),
            lora=LoRAConfig(enable_lora=True, max_loras=slots, max_lora_rank=rank),
        )
    )


def step_ms(engine: Engine, loras: list[LoRARequest], ids: list[list[int]], steps: int) -> list[float]:
    """Of decoding steps of a batch, a request for each prompt; the adapters take turns."""
    for number, prompt in enumerate(ids):
        lora = loras[number % len(loras)] if loras else None
        engine.add(Request(str(number), prompt, GREEDY, lora=lora))
    while engine.stats.waiting or engine.stats.running < len(ids):
        engine.step()
    engine.step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        taken.append(1e3 * (time.perf_counter() - start))
    for number in range(len(ids)):
        engine.abort(str(number))
    while engine.has_work:
        engine.step()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a checkpoint with grouped-query attention")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--steps", type=int, default=20, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="two steps in one round")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.dry_run:
        args.steps, args.rounds = 2, 1
    model, rows = ModelConfig(model=args.model, attention_backend=args.backend), []
    table = Table("rank", "drafts", "adapters", "ms per step", "over none")
    most = max(1, *args.adapters)
    with tempfile.TemporaryDirectory() as folder:
        for rank in args.ranks:
            made: list[LoRARequest] = []
            for drafts in args.drafts:
                context = 64 + (args.steps + 4) * (drafts + 1)
                engine = engine_of(model, drafts, rank, most, args.requests, context)
                made = made or write_adapters(model, layers_of(model), rank, most, Path(folder))
                ids = torch.randint(2, engine.card.vocab, (args.requests, 16), generator=torch.Generator().manual_seed(0)).tolist()
                taken: dict[int, list[float]] = {count: [] for count in args.adapters}
                for turn in range(args.rounds):
                    order = args.adapters[turn % len(args.adapters) :] + args.adapters[: turn % len(args.adapters)]
                    for count in order:
                        taken[count] += step_ms(engine, made[:count], ids, args.steps)
                engine.close()
                none = median(taken[0]) if 0 in taken else None
                for count, times in taken.items():
                    row = {"rank": rank, "drafts": drafts, "adapters": count, "requests": args.requests, "ms": median(times)}
                    row["over_none"] = None if none is None else median(times) / none
                    rows.append(row)
                    over = "-" if none is None else f"{median(times) / none:.2f}"
                    table.add_row(str(rank), str(drafts), str(count), f"{median(times):.2f}", over)
    Console().print(table)
    if args.json:
        save(args.json, {"model": args.model, "rows": rows})


def layers_of(model: ModelConfig) -> int:
    return int(json.loads((model.directory / "config.json").read_text())["num_hidden_layers"])


if __name__ == "__main__":
    main()
