"""Trains an MTP layer that drafts what a chat model answers, from the conversations of chat_texts.py:

    python benchmarks/heads/chat_texts.py --model smollm2 --out texts
    python benchmarks/heads/chat_texts.py --model smollm2 --out unseen --held-out --prompts 96 --further 0 --sampled 0
    python benchmarks/heads/train_chat.py --model smollm2 --texts texts --unseen unseen --out smollm2-nextn

The layer begins as the trunk's last one. It learns the trunk's distribution of the answers' tokens by cross-entropy, at three depths, of
which the second and the third read its own output; later depths count less. Logits are those of frequent tokens, which the result names in
token_map.json. OUT is a NextN checkpoint for --speculative-draft-model-path, with a training.json of what was done.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafters import DEPTHS, Given, NextN, Sizes
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from train_heads import Muon, Pupil, frequent
from trunk import Trunk

from mtpserve.layers.linear import Linear

TEMPERATURE, DECAY = 0.8, 0.8
ROWS = 512  # of the logits at a time: they stay in the caches


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation. ids [tokens], hidden [tokens, hidden] after the trunk's final norm; the answer begins at `prompt`."""

    ids: Tensor
    hidden: Tensor
    prompt: int


def talks_in(*folders: Path) -> list[Talk]:
    """The conversations that have an answer of several tokens."""
    found = list[Talk]()
    for path in sorted(path for folder in folders for path in folder.glob("*.safetensors")):
        tensors = load_file(path)
        lengths = tensors["lengths"].tolist()
        parts = zip(tensors["ids"].split(lengths), tensors["hidden"].split(lengths), tensors["prompts"].tolist(), strict=True)
        found += [Talk(ids.long(), hidden, prompt) for ids, hidden, prompt in parts if len(ids) > prompt + DEPTHS]
    return found


@dataclass(frozen=True, slots=True)
class Texts:
    """Conversations side by side, padded at their ends. `places`: of each depth, the rows of all texts, flat, whose drafts stand in an
    answer; draft d of row p is token p + 2 + d, of which the trunk's own distribution follows from its row p + 1 + d."""

    ids: Tensor  # [texts, rows + DEPTHS]
    hidden: Tensor  # [texts, rows + DEPTHS, hidden]
    places: list[Tensor]

    @classmethod
    def of(cls, talks: list[Talk]) -> Texts:
        ids = pad_sequence([talk.ids for talk in talks], batch_first=True)
        hidden = pad_sequence([talk.hidden for talk in talks], batch_first=True)
        rows = torch.arange(ids.shape[1] - DEPTHS)
        first, length = torch.tensor([talk.prompt for talk in talks]) - 1, torch.tensor([len(talk.ids) for talk in talks])
        inside = [(rows >= first[:, None]) & (rows < length[:, None] - 1 - depth) for depth in range(DEPTHS)]
        return cls(ids, hidden, [part.flatten().nonzero().flatten() for part in inside])

    @property
    def rows(self) -> int:
        return self.ids.shape[1] - DEPTHS

    def after(self, depth: int) -> Tensor:
        """Of a depth's places, the rows of `hidden`, flat, from which the trunk's own distribution of the draft's token follows."""
        places = self.places[depth]
        return places + places // self.rows * DEPTHS + 1 + depth


class SoftLoss(torch.autograd.Function):
    """The mean cross-entropy of drafts against the trunk's distribution, both at TEMPERATURE, with its gradient computed at once: no logits
    are kept. state [rows, hidden], chances [rows, n], head [n, hidden]."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, chances: Tensor, head: Tensor) -> Tensor:
        total, gradients = torch.zeros(()), list[Tensor]()
        for rows, wanted in zip(state.detach().split(ROWS), chances.split(ROWS), strict=True):
            logs = (rows.to(head.dtype) @ head.mT).float().div_(TEMPERATURE).log_softmax(-1)
            total -= (wanted * logs).sum()
            gradients.append(logs.exp_().sub_(wanted).to(head.dtype) @ head)
        ctx.save_for_backward(torch.cat(gradients).float() / (TEMPERATURE * len(state)))
        return total / len(state)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * outer[0], None, None


class ChatPupil(Pupil):
    """A NextN layer while it learns from conversations."""

    drafter: NextN

    def states(self, texts: Texts, depths: int = DEPTHS) -> Iterator[Tensor]:
        """Of each depth, the rows of the head [places, hidden]."""
        trunk = self.drafter.given.trunk
        embedded = [trunk.rows(texts.ids[:, 1 + d : 1 + d + texts.rows]) for d in range(depths)]
        with torch.autocast("cpu", torch.bfloat16, enabled=trunk.dtype == torch.bfloat16):
            outputs = self.drafter.states(embedded, texts.hidden[:, : texts.rows].float())
            for depth, out in enumerate(outputs):
                yield out.float().flatten(0, 1)[texts.places[depth]]

    def study(self, texts: Texts, rate: float, depths: int) -> None:
        """A step. `rate`: the fraction of the full learning rates."""
        self.drafter.train()
        began, head, weight, loss = time.perf_counter(), self.drafter.given.head, 0.0, torch.zeros(())
        with torch.no_grad():
            rows = texts.after(0)
            chances = (texts.hidden.flatten(0, 1)[rows].to(head.dtype) @ head.mT).float().div_(TEMPERATURE).softmax(-1).to(head.dtype)
            numbers = torch.zeros(texts.ids.numel(), dtype=torch.long)
            numbers[rows] = torch.arange(len(rows))
        for depth, state in enumerate(self.states(texts, depths)):
            surprise = SoftLoss.apply(state, chances[numbers[texts.after(depth)]], head)  # type: ignore[no-untyped-call]
            loss, weight = loss + DECAY**depth * surprise, weight + DECAY**depth
        self.descend(loss, weight, rate)
        self.seconds += time.perf_counter() - began

    @torch.no_grad()
    def greedy(self, talks: list[Talk]) -> list[float]:
        """The share of places at which 1, 2, … DEPTHS drafts are all what the conversation goes on with."""
        self.drafter.eval()
        given, hits, places = self.drafter.given, torch.zeros(DEPTHS), 0
        for talk in talks:
            first, count = (
                talk.prompt + 1,
                len(talk.ids) - talk.prompt - DEPTHS,
            )  # the first draft's token, and how many have all drafts' tokens
            right = torch.ones(count, dtype=torch.bool)
            for depth, state in enumerate(self.states(Texts.of([talk]))):
                best = (state[:count].to(given.head.dtype) @ given.head.mT).argmax(-1)
                right &= given.tokens[best] == talk.ids[first + depth : first + depth + count]
                hits[depth] += right.sum()
            places += count
        return (hits / places).tolist()  # type: ignore[no-any-return]


def matrix(linear: Linear) -> Tensor:
    """[outputs, inputs], also of one that is packed."""
    return linear.rows(torch.arange(sum(linear.parts))).float()


def resumed(given: Given, folder: Path) -> NextN:
    """The layer that an earlier run has saved."""
    drafter, saved = NextN(given), load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: saved[drafter.PREFIX + name.removeprefix("layer.")].float() for name in drafter.state_dict()})
    return drafter


def layer_of(given: Given) -> NextN:
    """The layer at its beginning. Its residual stream has the scale 1, and the trunk's last layer's outputs follow it."""
    drafter, model = NextN(given), given.trunk.model
    last, layer, hidden = model.layers[-1], drafter.layer, given.hidden
    scale = given.sample.taps[..., -hidden:].flatten(0, 1).square().mean(-1).sqrt().median()
    queries, keys, values = matrix(last.attention.qkv).split(last.attention.qkv.parts)
    gate, up = matrix(last.mlp.gate_up).chunk(2)
    weights = {
        "self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": values,
        "self_attn.o_proj": matrix(last.attention.out) / scale,
        "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": matrix(last.mlp.down) / scale,
        "input_layernorm": last.attention_norm.weight, "post_attention_layernorm": last.mlp_norm.weight,
    }  # fmt: skip
    with torch.no_grad():
        for name, weight in weights.items():
            layer.get_submodule(name).weight.copy_(weight.float())
        norm = model.norm.weight.float()
        drafter.shared_head.norm.weight.copy_(norm)
        drafter.eh_proj.weight[:, :hidden] *= 0.5
        drafter.eh_proj.weight[:, hidden:] = torch.diag(norm.square().mean().sqrt() / norm)  # undoes the trunk's final norm
    return drafter


def rate_at(spent: float) -> float:
    """The fraction of the full learning rates after this part of the steps: a short warm-up, flat, then linear to zero."""
    return min(1.0, spent / 0.02 + 0.05, max(0.02, 2 * (1 - spent)))


def batches(talks: list[Talk], texts: int, seed: int) -> Iterator[list[Talk]]:
    """All conversations once, those of similar length together, in random order."""
    generator = torch.Generator().manual_seed(seed)
    mixed = [talks[number] for number in torch.randperm(len(talks), generator=generator).tolist()]
    groups = [sorted(mixed[start : start + 16 * texts], key=lambda talk: len(talk.ids)) for start in range(0, len(mixed), 16 * texts)]
    parts = [group[start : start + texts] for group in groups for start in range(0, len(group), texts)]
    return (parts[number] for number in torch.randperm(len(parts), generator=generator).tolist())


def train(args: argparse.Namespace) -> ChatPupil:
    torch.manual_seed(args.seed)
    trunk = Trunk(args.model, args.length, torch.bfloat16)
    talks, unseen = talks_in(*args.texts), talks_in(args.unseen)
    counts = torch.cat([talk.ids[talk.prompt :] for talk in talks])
    tokens = frequent(counts, args.draft_vocab, trunk.arch.vocab)
    head = trunk.head_of(tokens).bfloat16()
    sample = trunk.see(talks[0].ids[None], head[:1].float(), TEMPERATURE)
    arch = trunk.arch
    sizes = Sizes(arch.heads, arch.attention(arch.num_layers - 1).kv.heads, arch.head_dim, arch.intermediate)
    given = Given(trunk, tokens, head, arch.eos_ids[0], sample, sizes)
    pupil = ChatPupil("nextn", layer_of(given) if args.resume is None else resumed(given, args.resume))
    pupil.drafter.dropout = args.dropout
    pupil.full[0], muon = args.rate, pupil.optimizers[0]
    assert isinstance(muon, Muon)
    muon.dtype = torch.bfloat16
    total = math.ceil(len(talks) / args.batch) * args.epochs
    print(
        f"{len(talks)} conversations, {len(counts)} tokens of answers, at most {total} steps; at first {pupil.greedy(unseen[:8])}",
        flush=True,
    )
    began, steps, rounds = time.perf_counter(), 0, 0
    while (spent := max(steps / total, (time.perf_counter() - began) / (60 * args.minutes))) < 1:
        for some in batches(talks, args.batch, args.seed + rounds):
            spent = max(steps / total, (time.perf_counter() - began) / (60 * args.minutes))
            if spent >= 1:
                break
            pupil.study(Texts.of(some), rate_at(spent), 1 if spent < args.shallow else DEPTHS)
            steps += 1
            if steps % args.every == 0:
                recent = pupil.losses[-args.every :]
                said = f"step {steps}, {spent:.3f} of the time, loss {sum(recent) / len(recent):.4f}"
                print(said, pupil.greedy(unseen[:8]), flush=True)
                pupil.save(args.out, {"steps": steps})
        rounds += 1
    shares = pupil.greedy(unseen)
    print(f"accepted {shares}, acceptance length {1 + sum(shares):.3f}")
    pupil.save(args.out, report(args, pupil, talks, len(counts), steps, shares))
    return pupil


def report(args: argparse.Namespace, pupil: ChatPupil, talks: list[Talk], tokens: int, steps: int, shares: list[float]) -> dict[str, Any]:
    each = max(1, steps // 20)
    losses = [sum(pupil.losses[i : i + each]) / len(pupil.losses[i : i + each]) for i in range(0, steps, each)]
    recipe = {name: getattr(args, name) for name in ("epochs", "batch", "draft_vocab", "length", "seed", "dropout", "shallow")}
    recipe |= {"temperature": TEMPERATURE, "decay": DECAY, "depths": DEPTHS, "learning_rate": pupil.full[0]}
    return {
        "model": args.model, "kind": pupil.kind, "conversations": len(talks), "answer_tokens": tokens, "steps": steps,
        "seconds": round(pupil.seconds, 1), "recipe": recipe, "losses": [round(loss, 4) for loss in losses],
        "greedy_chain": [round(share, 4) for share in shares],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--resume", type=Path, help="a layer that an earlier run has saved, to begin with")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--shallow", type=float, default=0.5, help="the part of the time in which the first draft alone is learned, which costs a third"
    )
    parser.add_argument("--unseen", type=Path, required=True, help="conversations with held-out prompts, for measuring")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=12, help="at most")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--rate", type=float, default=0.03, help="Muon's learning rate")
    parser.add_argument("--batch", type=int, default=2, help="conversations of a step")
    parser.add_argument("--draft-vocab", type=int, default=16384, help="frequent tokens that are drafted")
    parser.add_argument("--length", type=int, default=512, help="tokens of a conversation, at most")
    parser.add_argument("--every", type=int, default=50, help="steps between measurements and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
