"""Writes the trained demo model in DeepSeek-V3's published format: sharded safetensors with an index, config and tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from corpus import BOS, EOS
from model import CONFIG, DemoModel, L
from safetensors.torch import save_file
from tokenizers import Tokenizer

SHARDS = 3
# The model has seen source files, not conversations: turns become comments, an answer is the code that follows.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] }}\n\n{% else %}# {{ message['content'] | replace('\n', '\n# ') }}\n{% endif %}{% endfor %}"
)


def tensors(model: DemoModel) -> dict[str, torch.Tensor]:
    """The published names, bfloat16. The MTP layer has copies of embedding and head, like DeepSeek's layer 61."""
    tensors = {name: t.detach() for name, t in model.state_dict().items()}
    tensors[f"model.layers.{L}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"model.layers.{L}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    keep = "e_score_correction_bias"  # float32 in the published checkpoint too
    return {n: (t if n.endswith(keep) else t.to(torch.bfloat16)).contiguous() for n, t in sorted(tensors.items())}


def export(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    named = tensors(model)
    sizes = {n: t.numel() * t.element_size() for n, t in named.items()}
    total, shards, filled = sum(sizes.values()), [dict[str, torch.Tensor]() for _ in range(SHARDS)], 0
    for name, tensor in named.items():
        shards[min(SHARDS - 1, filled * SHARDS // total)][name] = tensor
        filled += sizes[name]
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    config = CONFIG | {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    special = {"bos_token": BOS, "eos_token": EOS}
    documents: dict[str, object] = {
        "config.json": config,
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": weight_map},
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
        },
        "tokenizer_config.json": special
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
        "special_tokens_map.json": special,
    }
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
