"""A hybrid model with an MTP layer, in Qwen3.5's layout: 5.6 M parameters, trained for minutes as trained.py trains a dense one.

`python benchmarks/hybrid.py --out DIRECTORY`, then `mtpserve launch --model DIRECTORY --speculative-algorithm NEXTN`, or
`python benchmarks/acceptance.py --model DIRECTORY` for what is accepted of its drafts on files that were held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from trained import END, EPS, Size, train
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

SMALL = Size(4, 256, 704, 4, 2, 64, 4096, 12 << 20, 8, 256, 3)
TOY = Size(2, 64, 96, 2, 1, 32, 300, 1 << 16, 2, 32, 2)
SIZES = {"6m": SMALL, "toy": TOY}
THETA, ROTATED = 640000.0, 0.25


def settings(s: Size, end: int = 0) -> dict[str, Any]:
    """Every other layer attends: of four layers, one would be few."""
    return {
        "vocab_size": s.vocab, "hidden_size": s.hidden, "intermediate_size": s.inner, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.dim, "max_position_embeddings": 8192,
        "rms_norm_eps": EPS, "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": ROTATED},
        "layer_types": ["full_attention" if i % 2 else "linear_attention" for i in range(s.layers)], "tie_word_embeddings": False,
        "linear_num_key_heads": s.kv_heads, "linear_num_value_heads": s.heads, "linear_key_head_dim": s.dim, "linear_value_head_dim": s.dim,
        "linear_conv_kernel_dim": 4, "eos_token_id": end,
    }  # fmt: skip


class MTP(nn.Module):
    """The names are the published checkpoint's."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (Qwen3_5RMSNorm(config.hidden_size, eps=EPS) for _ in range(3))
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, turned: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, device=x.device).triu(1)[None, None]
        out: torch.Tensor = self.norm(self.layers[0](x, position_embeddings=turned, attention_mask=mask))
        return out


class Model(nn.Module):
    """trained.Model, of transformers' layers."""

    def __init__(self, s: Size) -> None:
        super().__init__()
        self.s = s
        config = Qwen3_5TextConfig(**settings(self.s), attn_implementation="eager")
        self.trunk, self.mtp = Qwen3_5ForCausalLM(config), MTP(config)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(
                    p, std=0.02 * ((2 * self.s.layers) ** -0.5 if "o_proj" in name or "out_proj" in name or "down" in name else 1)
                )

    def forward(self, ids: torch.Tensor, depths: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        inner, head = self.trunk.model, self.trunk.lm_head
        x = inner(ids, use_cache=False).last_hidden_state
        logits, drafted = head(x), []
        for depth in range(1, depths + 1):
            places = torch.arange(ids.shape[1] - depth, device=ids.device)[None]
            x = self.mtp(x[:, :-1], inner.embed_tokens(ids[:, depth:]), inner.rotary_emb(x, places[None].expand(3, 1, -1)))
            drafted.append(head(x))
        return logits, drafted


def write(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name.removeprefix("trunk."): tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors")
    end = tokenizer.token_to_id(END)
    config = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config | settings(model.s, end), indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=13)
    parser.add_argument("--out", type=Path, default=Path("hybrid"))
    parser.add_argument("--size", choices=list(SIZES), default="6m")
    args = parser.parse_args()
    print(train(args.out, args.minutes, SIZES[args.size], model_of=Model, write=write))
