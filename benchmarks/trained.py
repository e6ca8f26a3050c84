"""A dense model with an MTP layer, of 125 M parameters (on a GPU) or 6.4 M (on a CPU), trained for minutes on this machine's Python files.

It has MiMo's architecture, so that mtpserve and vLLM can serve it, with real acceptance. Used by peers/cpu.py; by itself:
`python benchmarks/trained.py --minutes 10 --out DIRECTORY`. Files are held out as in the demo model's corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "demo_model"))
from corpus import PIECES
from muon import Muon

THETA, EPS, END = 640000.0, 1e-5, "<|end_of_text|>"
MTP_WEIGHT, TEMPERATURE = 0.3, 0.6


@dataclass(frozen=True, slots=True)
class Size:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    corpus: int  # bytes
    rows: int
    length: int
    unrolled: int  # depths at which the MTP layer learns, fed with its own output


FULL = Size(12, 768, 2048, 12, 4, 64, 32000, 400 << 20, 32, 1024, 2)
SMALL = Size(4, 256, 800, 4, 2, 64, 4096, 12 << 20, 8, 256, 3)
TOY = Size(2, 64, 96, 2, 1, 32, 300, 1 << 16, 2, 32, 2)
SIZES = {"125m": FULL, "6m": SMALL, "toy": TOY}


class Layer(nn.Module):
    """The names are the published checkpoint's."""

    def __init__(self, s: Size) -> None:
        super().__init__()
        self.s = s
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(s.hidden, eps=EPS), nn.RMSNorm(s.hidden, eps=EPS)
        sizes = {"q_proj": s.heads, "k_proj": s.kv_heads, "v_proj": s.kv_heads}
        self.self_attn = nn.ModuleDict({name: nn.Linear(s.hidden, heads * s.dim) for name, heads in sizes.items()})
        self.self_attn["o_proj"] = nn.Linear(s.heads * s.dim, s.hidden, bias=False)
        self.mlp = nn.ModuleDict({name: nn.Linear(s.hidden, s.inner, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        s, normed = self.s, self.input_layernorm(x)
        q, k, v = (self.self_attn[name](normed).unflatten(-1, (-1, s.dim)).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj"))
        seen = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True, enable_gqa=True)
        x = x + self.self_attn["o_proj"](seen.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))


class MTPLayer(Layer):
    def __init__(self, s: Size) -> None:
        super().__init__(s)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (nn.RMSNorm(s.hidden, eps=EPS) for _ in range(3))
        self.input_proj = nn.Linear(2 * s.hidden, s.hidden, bias=False)

    def fused(self, hidden: Tensor, embedded: Tensor, turn: Tensor) -> Tensor:
        return self(self.input_proj(torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], -1)), turn)


class Model(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens, self.lm_head = nn.Embedding(s.vocab, s.hidden), nn.Linear(s.hidden, s.vocab, bias=False)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm, self.mtp = nn.RMSNorm(s.hidden, eps=EPS), MTPLayer(s)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 * ((2 * s.layers) ** -0.5 if "o_proj" in name or "down" in name else 1))

    def forward(self, ids: Tensor, depths: int) -> tuple[Tensor, list[Tensor]]:
        """ids [rows, length] → the trunk's logits, and the MTP layer's at each depth, fed with its own output from the second on."""
        turn = angles(ids.shape[1], self.s.dim, ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, turn)
        logits, drafted = self.lm_head(self.norm(x)), []
        for depth in range(1, depths + 1):
            x = self.mtp.fused(x[:, :-1], self.embed_tokens(ids[:, depth:]), turn[: ids.shape[1] - depth])
            drafted.append(self.lm_head(self.mtp.final_layernorm(x)))
        return logits, drafted


def angles(length: int, dim: int, device: torch.device) -> Tensor:
    inverse = THETA ** -(torch.arange(0, dim, 2, device=device) / dim)
    turn = torch.arange(length, device=device)[:, None] * inverse
    return torch.stack([turn.cos(), turn.sin()], 1).to(torch.float32)  # [length, 2, dim / 2]


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    cos, sin = turn.to(x.dtype).unbind(1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def texts(size: int) -> tuple[list[str], list[str]]:
    """→ to train on, about `size` bytes; held out. Without tables, which are data."""
    used, held, read = list[str](), list[str](), 0
    for root in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            if read >= size:
                break
            text = path.read_text("utf8", errors="ignore")
            if len(text) < 400 or path.parent.name in ("encodings", "pydoc_data"):
                continue
            read += len(text)
            (held if hashlib.sha256(path.name.encode()).digest()[0] < 5 else used).append(text)
    return used, held


def tokenizer_of(used: list[str], s: Size) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=s.vocab, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(used[:: max(1, len(used) // 4000)], trainer)
    return tokenizer


def loss_of(model: Any, ids: Tensor, last: bool) -> Tensor:
    """Next tokens for both; in the `last` part of the time the trunk is frozen and the layer learns the trunk's distribution."""
    logits, drafted = model(ids, model.s.unrolled if last else 1)
    if not last:
        trunk = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return trunk + MTP_WEIGHT * F.cross_entropy(drafted[0][:, :-1].flatten(0, 1), ids[:, 2:].flatten())
    loss = torch.zeros((), device=ids.device)
    for depth, own in enumerate(drafted, 1):
        target = (logits[:, depth:].detach().float() / TEMPERATURE).softmax(-1)
        loss = loss - (target * (own.float() / TEMPERATURE).log_softmax(-1)).sum(-1).mean()
    return loss


def train(
    out: Path, minutes: float, s: Size = FULL, share: float = 0.8, model_of: Callable[[Size], Any] = Model,
    write: Callable[[Any, Tokenizer, Path], None] | None = None,
) -> Path:  # fmt: skip
    """→ the directory of the checkpoint. `model_of`, `write`: of another architecture, as Model and write_mimo."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    used, _ = texts(s.corpus)
    tokenizer = tokenizer_of(used, s)
    end = tokenizer.token_to_id(END)
    data = torch.tensor([t for encoded in tokenizer.encode_batch(used) for t in (*encoded.ids, end)], dtype=torch.int32)
    model = model_of(s).to(device)
    compiled = torch.compile(model) if s is FULL else model
    wide = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    rest = [p for p in model.parameters() if not any(p is w for w in wide)]
    optimizers = [Muon(wide, lr=0.02), torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    full = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    generator, begin, step, last = torch.Generator().manual_seed(0), time.monotonic(), 0, False
    while (spent := (time.monotonic() - begin) / (60 * minutes)) < 1 or step < 2:
        if spent > share and not last:
            last = True
            for name, p in model.named_parameters():
                p.requires_grad_(name.startswith("mtp."))
        starts = torch.randint(len(data) - s.length, (s.rows,), generator=generator).tolist()
        ids = torch.stack([data[start : start + s.length] for start in starts]).to(device).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(compiled, ids, last)
        loss.backward()
        rate = min(1.0, spent / 0.02 + 0.05, max(0.02, 2 * (1 - spent)))
        for group, lr in zip((g for optimizer in optimizers for g in optimizer.param_groups), full, strict=True):
            group["lr"] = lr * rate
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {100 * spent:.0f} %, loss {loss.item():.3f}", flush=True)
    (write or write_mimo)(model, tokenizer, out)
    return out


def write_mimo(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    s = model.s
    out.mkdir(parents=True, exist_ok=True)
    named = {("" if name.startswith("lm_head") else "model.") + name.replace("mtp.", "mtp_layers.0.", 1): tensor
             for name, tensor in model.state_dict().items()}  # fmt: skip
    save_file({name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in named.items()}, out / "model.safetensors")
    # MiMo's own model_type is not known to transformers, and so not to vLLM; Qwen2's has the same fields.
    config = {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_hidden_layers": s.layers, "num_nextn_predict_layers": 1,
        "hidden_size": s.hidden, "intermediate_size": s.inner, "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads,
        "head_dim": s.dim, "vocab_size": s.vocab, "max_position_embeddings": 8192, "rms_norm_eps": EPS, "rope_theta": THETA,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": True, "eos_token_id": tokenizer.token_to_id(END),
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}) + "\n")
    (out / "training.json").write_text(json.dumps(asdict(s), indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path("trained"))
    parser.add_argument("--size", choices=list(SIZES), default="125m")
    args = parser.parse_args()
    print(train(args.out, args.minutes, SIZES[args.size]))
