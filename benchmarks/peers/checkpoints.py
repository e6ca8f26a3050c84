"""The checkpoints that all engines serve, and what they are asked."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.inflate import SHAPES, inflate
from trained import SIZES, SMALL, texts, train

TRAINED, DEMO = "small", "demo"
MODELS = (TRAINED, *SHAPES, DEMO)
PROMPT = 64  # tokens of a prompt
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mtpserve-benchmarks"
DEMO_FOLDER = Path(__file__).parents[2] / "mtpserve" / "demo"


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is `ids`, as the model's tokenizer says: engines that take no ids get the same prompt."""

    ids: list[int]
    text: str


def checkpoint(name: str, cache: Path, minutes: float, size: str) -> Path:
    """Made if it is not in `cache`. `size`: of the trained model, in SIZES. `demo` is the bundled one."""
    if name == DEMO:
        return DEMO_FOLDER
    made = cache / f"{name}-{size}"
    if all((made / file).exists() for file in ("config.json", "tokenizer.json")):  # the last that are written
        return made
    if name == TRAINED:
        print(f"training the small model for {minutes:g} minutes", flush=True)
        return train(made, minutes, SIZES[size])
    inflate(checkpoint(TRAINED, cache, minutes, size), made, SHAPES[name])
    return made


def make_prompts(model: Path) -> list[Prompt]:
    """What the trained model has not seen, in pieces of PROMPT tokens that survive the way to text and back. A token with which the
    tokenizer begins every text comes on top."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts(SMALL.corpus)[1]]
    pieces = dict.fromkeys(tuple(ids[at : at + PROMPT]) for ids in encoded for at in range(0, len(ids) - PROMPT + 1, PROMPT))
    said = [tokenizer.decode(list(piece), skip_special_tokens=False) for piece in pieces]
    back = [tokenizer.encode(text, add_special_tokens=False).ids for text in said]
    kept = [text for piece, text, ids in zip(pieces, said, back, strict=True) if list(piece) == ids]
    return [Prompt(tokenizer.encode(text).ids, text) for text in kept]


def view(model: Path, folder: Path) -> Path:
    """The same weights and tokenizer, linked, under a config for engines that know transformers' architectures only.

    MiMo's trunk is Qwen2's, and its MTP layer is left unread. There is no end token, for engines that cannot be told to ignore it.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    written = {"config.json": config}
    if config["architectures"] == ["MiMoForCausalLM"]:
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False}
        # For this type transformers 5 splits texts as Qwen2's tokenizer does, whatever tokenizer.json says, unless this names code.
        written["tokenizer_config.json"] = {"tokenizer_class": "TokenizersBackend", "auto_map": {"AutoTokenizer": [None, None]}}
    config["eos_token_id"] = None
    out = folder / f"{model.name}-{hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:8]}"
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = out / file.name
        if file.name not in (*written, "generation_config.json") and not link.exists():
            link.symlink_to(file.resolve())
    for name, content in written.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    return out
