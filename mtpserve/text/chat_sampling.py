"""How chats are sampled where neither the checkpoint nor the request says it.

The first of these that is there counts:

    the checkpoint   generation_config.json, or a GGUF file's metadata: the fields that a request leaves out
    the request      any of temperature, top_p, top_k, min_p: the fields that it leaves out do nothing
    the model card   values that the model's makers publish: PUBLISHED
    mtpserve         GENERAL

The last two are for chats alone; completions and token APIs keep the raw distribution. Each is taken whole or
not at all: a client that names a part of its own gets no part of another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mtpserve.config import ModelConfig
from mtpserve.core.gguf import SUFFIX, GGUFHeader
from mtpserve.core.sampling import SAMPLING_FIELDS
from mtpserve.text.tokenizer import Tokenizer

Values = Mapping[str, float | int]
Source = Literal["checkpoint", "model card", "mtpserve", "raw"]

GENERAL: Values = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
RAW: Values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
QWEN_INSTRUCT: Values = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
# A model's name in lower case with dashes → the values on its model card. The first pattern that fits counts.
PUBLISHED: tuple[tuple[str, Values], ...] = (
    (r"smollm2", {"temperature": 0.2, "top_p": 0.9}),
    (r"smollm3", {"temperature": 0.6, "top_p": 0.95}),
    (r"deepseek-r1", {"temperature": 0.6, "top_p": 0.95}),
    (r"deepseek-v3\.?2", {"temperature": 1.0, "top_p": 0.95}),
    (r"qwen3\.\d|^qwen3-5(?:-|$)", {"temperature": 1.0, "top_p": 0.95, "top_k": 20}),
    (r"qwen3-.*(?:instruct|coder)", QWEN_INSTRUCT),
    (r"qwen3", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    (r"qwen2\.5", QWEN_INSTRUCT),
    (r"llama-?3", {"temperature": 0.6, "top_p": 0.9}),
    (r"mimo-v2", {"temperature": 0.8, "top_p": 0.95}),
    (r"mimo", {"temperature": 0.6, "top_p": 0.95}),
    (r"glm-?4\.5", {"temperature": 0.6, "top_p": 0.95}),
    (r"glm-?4\.[67]|glm-?5", {"temperature": 1.0, "top_p": 0.95}),
    (r"(?:ling|ring)-(?:mini-2|flash-2\.0|1t)", {"temperature": 0.7, "top_p": 0.8}),
    (r"longcat-flash-thinking", {"temperature": 1.0, "top_p": 0.95}),
    (r"minimax-m2", {"temperature": 1.0, "top_p": 0.95, "top_k": 40}),
    (r"gpt-oss", {"temperature": 1.0, "top_p": 1.0}),
    (r"mistral-small-3", {"temperature": 0.15}),
    (r"gemma-?4", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}),
    (r"step-3\.5", {"temperature": 1.0, "top_p": 0.95}),
    (r"ernie-4\.5", {"temperature": 0.8, "top_p": 0.8}),
)


WORDS: Mapping[Source, str] = {
    "checkpoint": "as the checkpoint says",
    "model card": "as the model card says",
    "mtpserve": "neither checkpoint nor model card says",
    "raw": "the model's own distribution",
}


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """`values`: of chats that name no sampling. `source`: who says so; raw: nobody, and they are empty."""

    source: Source = "raw"
    values: Values = field(default_factory=dict)

    def defaults(self, named: bool) -> dict[str, float | int]:
        """The values of fields that a request leaves out. `named`: it gives one of SAMPLING_FIELDS."""
        return {} if named and self.source != "checkpoint" else dict(self.values)

    @property
    def effective_values(self) -> dict[str, float | int]:
        """The values of a chat that names none: one for each of SAMPLING_FIELDS."""
        return {name: self.values.get(name, RAW[name]) for name in SAMPLING_FIELDS}

    def __str__(self) -> str:
        values = ", ".join(
            f"{name} {value:g}" for name, value in self.effective_values.items() if value != RAW[name]
        )
        return f"{values or 'temperature 1'} ({WORDS[self.source]})"


def chat_sampling(model: ModelConfig, tokenizer: Tokenizer) -> ChatSampling:
    """Returns how chats are sampled that name nothing. Raises LoadError for a damaged GGUF file."""
    if not model.recommends:
        return ChatSampling()
    if tokenizer.defaults:
        return ChatSampling("checkpoint", tokenizer.defaults)
    if not tokenizer.has_chat_template:
        return ChatSampling()
    names = [normal(name) for name in model_names(model)]
    for pattern, values in PUBLISHED:
        if any(re.search(pattern, name) for name in names):
            return ChatSampling("model card", values)
    return ChatSampling("mtpserve", GENERAL)


def model_names(model: ModelConfig) -> list[str]:
    """What the model is called: by the options, by its directory or GGUF file, and inside of it."""
    path, names = model.directory, [model.model, *model.names]
    if path.suffix == SUFFIX:
        metadata = GGUFHeader.read(path).metadata
        said: list[object] = [metadata.get(f"general.{key}") for key in ("name", "basename", "architecture")]
    else:
        said = config_names(model)
    # a snapshot of the hub is in models--ORG--NAME/snapshots/HASH
    folders = [part for part in path.absolute().parts[-3:] if part.startswith("models--")]
    return [Path(name).name for name in (*names, path.name, *folders, *said) if isinstance(name, str)]


def config_names(model: ModelConfig) -> list[object]:
    try:
        config = json.loads((model.directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads the model says what is wrong
        return []
    return [config.get("_name_or_path"), config.get("model_type")] if isinstance(config, dict) else []


def normal(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name).lower()
