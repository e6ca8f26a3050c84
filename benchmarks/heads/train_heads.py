"""Trains draft models for a trunk, all of one kind of text, from one recipe, and each with the same tokens:

    python benchmarks/heads/train_heads.py --model demo --kinds eagle3 medusa dflash standalone --tokens 1500000
    python benchmarks/heads/train_heads.py --model smollm2 --kinds eagle eagle3 --draft-vocab 4096 --tokens 400000

The text is the Python standard library's source, without the files that the demo's corpus holds out. The trunk reads it once for all kinds;
each learns the trunk's distribution at the temperature of the demo model's own training, by cross-entropy. Later drafts count less.
Results are directories in the published layouts, OUT/MODEL-KIND, for --speculative-draft-model-path, with a training.json of what was done.
LD_PRELOAD=libtcmalloc_minimal.so.4 helps: otherwise half of the time may go into fresh pages of memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from drafters import DRAFTERS, Drafter, Given
from rich.progress import Progress, TextColumn
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import AdamW, Optimizer
from trunk import Seen, Trunk

sys.path.insert(0, str(Path(__file__).parents[1] / "demo_model"))
from corpus import files, held_out, is_held_out, read
from muon import Muon

from mtpserve.engine.startup.compute import has_bfloat16_units

LENGTH, TEXTS = 256, 4  # tokens of a text, and texts of a step
TEMPERATURE, DECAY = 0.6, 0.8
TOKEN_MAP = "token_map.json"  # --speculative-token-map, of those that draft with the trunk's head
HELD_OUT = 16  # steps' worth of texts that are measured at the end


def tokens_of(trunk: Trunk, paths: list[Path]) -> Tensor:
    """All files, one after another, each with the end of a text after it. [tokens]"""
    end = trunk.arch.eos_ids[0]
    return torch.tensor([token for path in paths for token in (*trunk.tokenizer.encode(read(path)), end)])


def batches(data: Tensor, length: int, texts: int, seed: int) -> Iterator[Tensor]:
    """Texts from random places [texts, length], without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - length, (texts,), generator=generator)
        yield torch.stack([data[start : start + length] for start in starts.tolist()])


def frequent(data: Tensor, count: int, vocabulary: int) -> Tensor:
    """The most frequent tokens, ascending."""
    if count >= vocabulary:
        return torch.arange(vocabulary)
    found = [token for token, _ in Counter(data.tolist()).most_common(count)]
    known = set(found)
    rest = (token for token in range(vocabulary) if token not in known)
    return torch.tensor(sorted(found + [next(rest) for _ in range(count - len(found))]))


@dataclass
class Pupil:
    """A drafter while it learns."""

    kind: str
    drafter: Drafter
    optimizers: list[Optimizer] = field(init=False)
    full: list[float] = field(init=False)  # learning rates
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = list(self.drafter.parameters())
        wide = [p for p in own if p.ndim == 2 and len(p) != len(self.drafter.given.tokens)]
        rest = [p for p in own if not any(p is w for w in wide)]
        self.optimizers = [Muon(wide, lr=0.02), AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)]
        self.full = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]

    def learn(self, seen: Seen, rate: float) -> None:
        """A step. `rate`: the fraction of the full learning rates."""
        began, weight, loss = time.perf_counter(), 0.0, torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.drafter.given.trunk.dtype == torch.bfloat16):
            for depth, (logits, chances) in enumerate(self.drafter.drafted(seen)):
                surprise = -(chances * (logits / TEMPERATURE).log_softmax(-1)).sum(-1).mean()
                loss, weight = loss + DECAY**depth * surprise, weight + DECAY**depth
        self.descend(loss, weight, rate)
        self.seconds += time.perf_counter() - began

    def descend(self, loss: Tensor, weight: float, rate: float) -> None:
        """One step down the gradient. `weight`: the sum of all drafts' weights in `loss`; `rate`: as for `learn`."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        for group, lr in zip(groups, self.full, strict=True):
            group["lr"] = lr * rate
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item() / weight)

    @torch.no_grad()
    def expected(self, texts: list[Seen]) -> list[float]:
        """Of each draft, the share that is accepted if those before it are what the text has: sum min(p, q)."""
        shares = [
            torch.stack([torch.minimum(p, (logits / TEMPERATURE).softmax(-1)).sum(-1).mean() for logits, p in self.drafter.drafted(seen)])
            for seen in texts
        ]
        return torch.stack(shares).mean(0).tolist()  # type: ignore[no-any-return]

    def save(self, out: Path, report: dict[str, object]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        tensors, trunk = self.drafter.tensors(), self.drafter.given.trunk
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        numbers = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
        for name, values in (("config", self.drafter.config()), ("training", report | {"parameters": numbers})):
            (out / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
        tokens = self.drafter.given.tokens
        if not self.drafter.own_head and len(tokens) < trunk.arch.vocab:
            (out / TOKEN_MAP).write_text(json.dumps(tokens.tolist()) + "\n")
        if self.kind == "standalone":  # it reads text by itself
            for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                shutil.copy(trunk.directory / file, out)


def train(args: argparse.Namespace) -> list[Pupil]:
    torch.manual_seed(0)
    trunk = Trunk(args.model, args.length, getattr(torch, args.dtype))
    if "standalone" in args.kinds and not (trunk.directory / "tokenizer.json").is_file():
        raise SystemExit(f"--kinds standalone: the draft model gets the model's tokenizer.json, and {trunk.directory} has none")
    data = tokens_of(trunk, [path for path in files() if not is_held_out(path)][: args.files])
    tokens = frequent(data, args.draft_vocab or trunk.arch.vocab, trunk.arch.vocab)
    head = trunk.head_of(tokens)
    measured = batches(tokens_of(trunk, held_out()[: args.files]), args.length, args.texts, seed=7)
    unseen = [trunk.see(next(measured), head, TEMPERATURE) for _ in range(HELD_OUT)]
    given = Given(trunk, tokens, head, trunk.arch.eos_ids[0], unseen[0])
    pupils = [Pupil(kind, DRAFTERS[kind](given)) for kind in args.kinds]
    began, done, steps, trunk_seconds = time.perf_counter(), 0, 0, 0.0
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[loss]}")) as progress:
        task = progress.add_task(f"{args.model}", total=1.0, loss="")
        for ids in batches(data, args.length, args.texts, seed=0):
            spent = max(done / args.tokens, (time.perf_counter() - began) / (60 * args.minutes))
            if spent >= 1:
                break
            before = time.perf_counter()
            seen = trunk.see(ids, head, TEMPERATURE)
            trunk_seconds += time.perf_counter() - before
            for pupil in pupils:
                # A short warm-up, flat, then linear to zero over the last half.
                pupil.learn(seen, min(1.0, spent / 0.02 + 0.05, max(0.02, 2 * (1 - spent))))
            done, steps = done + ids.numel(), steps + 1
            progress.update(task, completed=spent, loss="  ".join(f"{pupil.kind} {pupil.losses[-1]:.3f}" for pupil in pupils))
    for pupil in pupils:
        each = max(1, steps // 20)
        losses = [sum(pupil.losses[i : i + each]) / len(pupil.losses[i : i + each]) for i in range(0, steps, each)]
        report = {
            "model": args.model, "kind": pupil.kind, "tokens": done, "seconds": round(trunk_seconds + pupil.seconds, 1),
            "trunk_seconds": round(trunk_seconds, 1), "losses": [round(loss, 4) for loss in losses],
            "temperature": TEMPERATURE, "expected_acceptance": [round(share, 4) for share in pupil.expected(unseen)],
        }  # fmt: skip
        pupil.save(args.out / f"{Path(args.model).stem}-{pupil.kind}", report)
        print(f"{pupil.kind}: {report['seconds']} s, expected acceptance of each draft {report['expected_acceptance']}")
    return pupils


def main(arguments: list[str] | None = None) -> list[Pupil]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kinds", nargs="+", choices=list(DRAFTERS), default=["eagle3", "medusa", "dflash", "standalone"])
    parser.add_argument("--tokens", type=int, default=1 << 62, help="that each of them sees")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most, for all of them")
    parser.add_argument("--draft-vocab", type=int, help="frequent tokens that are drafted, not of medusa and standalone (default: all)")
    fast = "bfloat16" if has_bfloat16_units() else "float32"
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=fast, help="of products (default: by this CPU)")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=TEXTS, help="texts of a step")
    parser.add_argument("--files", type=int, help="at most, of those that are read (default: all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    args = parser.parse_args(arguments)
    if args.draft_vocab and (whole := {"medusa", "standalone"} & set(args.kinds)):
        parser.error(f"--draft-vocab: {' and '.join(sorted(whole))} draft from the whole vocabulary")
    return train(args)


if __name__ == "__main__":
    main()
