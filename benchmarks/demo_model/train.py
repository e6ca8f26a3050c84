"""Trains the bundled demo model from scratch: `python benchmarks/demo_model/train.py --minutes 80`.

Two stages. The first trains trunk and MTP layer together on next tokens (DeepSeek-V3's recipe: MTP loss x 0.3, depth 1). The
second freezes the trunk and trains the MTP layer to match the trunk's distribution when it gets its own output, three deep, as in
drafting: trained at depth 1 alone, its acceptance at depth 2 is 0.27.
LD_PRELOAD=libtcmalloc_minimal.so.4 and OMP_NUM_THREADS=2 help. `--resume` continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import files, held_out, is_held_out, tokens, train_tokenizer
from export import export
from model import DemoModel, V
from muon import Muon
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW, Optimizer

MTP_WEIGHT, DEPTHS, TEMPERATURE = 0.3, 3, 0.6


def batch(data: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - length - 1, (rows,), generator=generator)
    return torch.stack([data[s : s + length] for s in starts.tolist()])


def optimizers(model: DemoModel, only_mtp: bool) -> list[Optimizer]:
    named = dict(model.mtp.named_parameters() if only_mtp else model.named_parameters())
    wide = [p for n, p in named.items() if p.ndim == 2 and not any(w in n for w in ("embed_tokens", "lm_head", "gate.weight"))]
    rest = [p for p in named.values() if not any(p is w for w in wide)]
    return [Muon(wide, lr=0.01 if only_mtp else 0.02), AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)]


def joint_loss(model: DemoModel, ids: Tensor) -> tuple[Tensor, list[float]]:
    hidden = model.hidden(ids)
    trunk = F.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    drafted = model.draft_hidden(hidden[:, :-1], ids[:, :-1], 1)[0]
    mtp = F.cross_entropy(model.lm_head(drafted).flatten(0, 1), ids[:, 2:].flatten())
    return trunk + MTP_WEIGHT * mtp, [trunk.item(), mtp.item()]


def distil_loss(model: DemoModel, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Cross entropy against the trunk's softened distribution, summed over depths; reports the expected acceptance sum min(p, q)."""
    with torch.no_grad():
        hidden = model.hidden(ids)
        target = (model.lm_head(hidden) / TEMPERATURE).softmax(-1)
    loss, accepted = torch.zeros(()), []
    rows = ids.shape[1] - DEPTHS
    for depth, out in enumerate(model.draft_hidden(hidden, ids, DEPTHS)):
        p = target[:, 1 + depth : 1 + depth + rows]
        log_q = (model.lm_head(out) / TEMPERATURE).log_softmax(-1)
        loss = loss - (p * log_q).sum(-1).mean() * 0.8**depth
        accepted.append(torch.minimum(p, log_q.detach().exp()).sum(-1).mean().item())
    return loss, accepted


def learning_rate(progress: float) -> float:
    """Fraction of the full rate: a short warm-up, flat, then linear to zero over the last half."""
    return min(1.0, progress / 0.02 + 0.05, max(0.0, 2 * (1 - progress)))


def run_stage(name: str, model: DemoModel, data: Tensor, minutes: float, state: dict[str, object], save: Path) -> None:
    only_mtp = name == "distil"
    for p in model.parameters():
        p.requires_grad_(not only_mtp)
    model.mtp.requires_grad_(True)
    loss_of = distil_loss if only_mtp else joint_loss
    opts = optimizers(model, only_mtp)
    full = [group["lr"] for opt in opts for group in opt.param_groups]
    spent, step = 0.0, 0
    if state.get("stage") == name:
        spent, step = float(state["spent"]), int(state["step"])  # type: ignore[arg-type]
        for opt, saved in zip(opts, state["optimizers"], strict=True):  # type: ignore[call-overload]
            opt.load_state_dict(saved)
    generator = torch.Generator().manual_seed(1000 * only_mtp + step)
    model.train()
    if only_mtp:  # the trunk's router bias must stay as it is
        model.model.layers[:-1].eval()
    begin, saved_at, smooth = time.monotonic() - spent, time.monotonic(), [0.0] * (DEPTHS if only_mtp else 2)
    while (progress := (time.monotonic() - begin) / (60 * minutes)) < 1:
        rate = learning_rate(progress)
        for group, lr in zip((g for opt in opts for g in opt.param_groups), full, strict=True):
            group["lr"] = lr * rate
        loss, report = loss_of(model, batch(data, *((8, 512) if progress > 0.5 else (16, 256)), generator))
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        step += 1
        smooth = [r if step == 1 else 0.95 * s + 0.05 * r for s, r in zip(smooth, report, strict=True)]
        if step % 20 == 0:
            print(f"{name} step {step} {100 * progress:.1f}% " + " ".join(f"{s:.3f}" for s in smooth), flush=True)
        if time.monotonic() - saved_at > 240:
            saved_at = time.monotonic()
            torch.save(
                {"stage": name, "spent": saved_at - begin, "step": step, "model": model.state_dict(),
                 "optimizers": [opt.state_dict() for opt in opts]}, save)  # fmt: skip
    torch.save({"stage": name + " done", "model": model.state_dict()}, save)


@torch.no_grad()
def validate(model: DemoModel, data: Tensor) -> dict[str, float]:
    model.eval()
    generator = torch.Generator().manual_seed(7)
    rows = [batch(data, 8, 512, generator) for _ in range(4)]
    trunk = [joint_loss(model, ids)[1] for ids in rows]
    accepted = torch.tensor([distil_loss(model, ids)[1] for ids in rows]).mean(0)
    result = {"trunk_nats": sum(t[0] for t in trunk) / 4, "mtp_nats": sum(t[1] for t in trunk) / 4}
    return result | {f"acceptance_{d + 1}": a.item() for d, a in enumerate(accepted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=80, help="time for both stages together")
    parser.add_argument("--share", type=float, default=0.7, help="of which for the first stage")
    parser.add_argument("--out", type=Path, default=Path("demo-model"))
    parser.add_argument("--resume", action="store_true", help="go on from OUT/training.pt")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save, path = args.out / "training.pt", args.out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if args.resume else train_tokenizer()
    tokenizer.save(str(path))
    assert tokenizer.get_vocab_size() == V
    data = tokens(tokenizer, [p for p in files() if not is_held_out(p)])
    measured = tokens(tokenizer, held_out())
    print(f"{len(data)} training tokens, {len(measured)} held out", flush=True)
    model, state = DemoModel(), torch.load(save, weights_only=True) if args.resume else {}
    if state:
        model.load_state_dict(state["model"])
    if state.get("stage") not in ("joint done", "distil", "distil done"):
        run_stage("joint", model, data, args.minutes * args.share, state, save)
        print(json.dumps(validate(model, measured)), flush=True)
    if state.get("stage") != "distil done":
        run_stage("distil", model, data, args.minutes * (1 - args.share), state, save)
    print(json.dumps(validate(model, measured)), flush=True)
    export(model, tokenizer, args.out / "checkpoint")


if __name__ == "__main__":
    main()
